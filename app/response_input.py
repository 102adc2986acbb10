"""The `input` of a response: a string, messages in the easy form, or items as the API itself gives them back."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from app.errors import ApiError, BadRequest
from app.events import InputText, Item, OutputText
from app.ids import new_message_id
from app.request_params import unsupported

Role = Literal["user", "system", "developer", "assistant"]

ROLES: tuple[Role, ...] = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")
OTHER_PARTS = ("input_image", "input_file", "input_audio", "refusal")
OTHER_ITEMS = (
    *("function_call", "function_call_output", "reasoning", "item_reference", "file_search_call", "web_search_call"),
    *("computer_call", "computer_call_output", "image_generation_call", "code_interpreter_call", "local_shell_call"),
    *("local_shell_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
    *("custom_tool_call", "custom_tool_call_output", "compaction"),
)


def parse_items(value: Any, max_items: int, param: str) -> tuple[Item, ...]:
    """The items of an array, each with an id. Raises BadRequest that names the place, such as `input[2].content`."""
    if not isinstance(value, list):
        raise _invalid(param, "an array of items", value)
    if not value:
        raise BadRequest(f"'{param}' has no items.", code="invalid_value", param=param)
    if len(value) > max_items:
        raise BadRequest(f"'{param}' may have {max_items} items, got {len(value)}.", code="invalid_value", param=param)
    return tuple(_parse_item(item, f"{param}[{i}]") for i, item in enumerate(value))


def parse_input(value: Any, max_messages: int) -> tuple[Item, ...]:
    """The items of `input`, as `parse_items` gives them; a string is one. Raises BadRequest."""
    if isinstance(value, str):
        return (_item("user", [InputText(text=value)]),)
    if value is None:
        raise BadRequest("Missing required parameter: 'input'.", code="missing_required_parameter", param="input")
    if not isinstance(value, list):
        raise _invalid("input", "a string or an array of items", value)
    return parse_items(value, max_messages, "input")


def _parse_item(value: Any, param: str) -> Item:
    if not isinstance(value, dict):
        raise _invalid(param, "an object", value)
    kind = value.get("type", "message")
    if kind != "message":
        raise _unknown_kind(kind, f"{param}.type", OTHER_ITEMS, "'message'")
    role = value.get("role")
    if role not in ROLES:
        raise _invalid(f"{param}.role", "one of " + ", ".join(map(repr, ROLES)), role)
    return _item(cast(Role, role), _parse_content(value, role, param))


def _parse_content(item: Mapping[str, Any], role: str, param: str) -> list[InputText | OutputText]:
    param += ".content"
    if "content" not in item:
        raise BadRequest(f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)
    content = item["content"]
    if isinstance(content, str):
        return [_part(role, content)]
    if not isinstance(content, list) or not content:
        raise _invalid(param, "a string or an array of parts", content)
    return [_part(role, _parse_part(part, f"{param}[{i}]")) for i, part in enumerate(content)]


def _parse_part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(param, "an object", part)
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise _unknown_kind(kind, f"{param}.type", OTHER_PARTS, "'input_text' or 'output_text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{param}.text", "a string", text)
    return text


def _part(role: str, text: str) -> InputText | OutputText:
    return OutputText(text=text) if role == "assistant" else InputText(text=text)


def _item(role: Role, content: list[InputText | OutputText]) -> Item:
    return Item(id=new_message_id(), role=role, content=content)


def _unknown_kind(kind: Any, param: str, known: tuple[str, ...], wanted: str) -> ApiError:
    return unsupported(param) if kind in known else _invalid(param, wanted, kind)


def _invalid(param: str, wanted: str, got: Any) -> BadRequest:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return BadRequest(
        f"Invalid value for '{param}': should be {wanted}, got {shown}.", code="invalid_value", param=param
    )
