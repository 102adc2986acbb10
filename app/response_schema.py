"""What a client may send to create a response, over HTTP and on a websocket alike."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from app.errors import BadRequest
from app.request_params import (
    Int64,
    MaxTokens,
    RequestModel,
    SamplingFields,
    check_text_format,
    parse_request,
    unsupported,
)
from app.template_options import TemplateOptions
from engine.sampling_params import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


def _few_pairs(value: object) -> object:
    """Looked at first, so that there is at most one complaint for each of a few pairs."""
    if isinstance(value, dict) and len(value) > 16:
        raise ValueError(f"should have at most 16 pairs, has {len(value)}")
    return value


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if any(len(key) > 64 for key in value):
        raise ValueError("should have keys of at most 64 characters")
    if any(len(text) > 512 for text in value.values()):
        raise ValueError("should have values of at most 512 characters")
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(_few_pairs), AfterValidator(_metadata)]


def _variable(value: object) -> object:
    """Text as it is, or in the form of an input item."""
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("input_image", "input_file"):
        raise unsupported("prompt.variables")
    return value.get("text") if value.get("type") == "input_text" else value


Variable = Annotated[str, BeforeValidator(_variable)]


class PromptField(RequestModel):
    """The assistant: `{"id": ...}`."""

    id: str = Field(min_length=1, max_length=64)
    version: str | None = Field(default=None, max_length=64)
    """If it is not the assistant's version now, the request is refused."""
    variables: Annotated[dict[str, Variable], Field(max_length=64)] | None = None


def _id_of(value: object) -> object:
    return value.get("id") if isinstance(value, dict) and isinstance(value.get("id"), str) else value


class CreateResponse(SamplingFields):
    """`input` is parsed by app/response_input.py."""

    model: str | None = None
    """May be left out with `prompt` or `previous_response_id`: there is one model."""
    input: Annotated[Any, WithJsonSchema({"type": ["string", "array"], "items": {"type": "object"}})] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_id_of)] = None
    """Its id, also as `{"id": ...}`."""
    prompt: PromptField | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int64 | None = None
    chat_template_kwargs: TemplateOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # Known, not built, and each would change the answer.
    text: Any = None
    context_management: Any = None
    reasoning: Any = None
    moderation: Any = None
    generate: bool | None = None
    use_beam_search: bool | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def num_logprobs(self) -> int | None:
        """None: no log-probabilities were asked for."""
        if self.top_logprobs is None and LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    def refuse_unbuilt(self) -> Self:
        super().refuse_unbuilt()
        if self.n not in (None, 1):
            raise unsupported("n")
        for name in ("context_management", "moderation", "use_beam_search"):
            if getattr(self, name) not in (None, False, [], {}):
                raise unsupported(name)
        if self.generate is False:
            raise unsupported("generate")
        if self.return_token_ids:
            raise unsupported("return_token_ids")
        if any(value is not None for value in _object("reasoning", self.reasoning).values()):
            raise unsupported("reasoning")
        text = _object("text", self.text)
        check_text_format(text.get("format"), "text.format")
        if text.get("verbosity") not in (None, "medium"):
            raise unsupported("text.verbosity")
        if self.background and not self.is_stored:
            raise BadRequest("'background' needs 'store'.", code="invalid_value", param="background")
        if self.conversation is not None and not self.is_stored:
            raise BadRequest("'conversation' needs 'store'.", code="invalid_value", param="conversation")
        if self.conversation is not None and self.previous_response_id is not None:
            raise BadRequest(
                "A response goes on either with 'conversation' or with 'previous_response_id'.",
                code="invalid_value",
                param="previous_response_id",
            )
        return self


def _object(name: str, value: Any) -> dict[str, Any]:
    """Empty where there is none. Raises BadRequest for what is no object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"Invalid value for '{name}': should be an object.", code="invalid_type", param=name)
    return value


def parse_create(body: Mapping[str, Any]) -> CreateResponse:
    """Raises BadRequest for what is malformed or not built."""
    return parse_request(CreateResponse, body).refuse_unbuilt()
