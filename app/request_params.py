"""Sampling fields that all generating routes share, and how a request body becomes a checked model."""

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from app.errors import BadRequest, from_request_error
from app.scopes import Narrowing
from engine.errors import RequestError
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_ALL_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together."""
MAX_BIASES = 1024
MAX_ITEMS = 1024
"""Of lists that are read only to refuse them."""
MAX_INT64 = 2**63 - 1

_SHORT = reprlib.Repr()
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")

Model = TypeVar("Model", bound=BaseModel)


def parse_request(model: type[Model], body: Mapping[str, Any]) -> Model:
    """The body as a checked model. Raises BadRequest that names the field, as OpenAI does: `messages[0].content`."""
    try:
        return model.model_validate(body)
    except ValidationError as e:
        errors = e.errors(include_url=False, include_context=False)
        # of a union's complaints the one that got furthest says best what is wrong
        located = [(_path(body, error), error) for error in errors]
        path, error = max(located, key=lambda pair: len(pair[0]))
        param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        raise BadRequest(_message(param, error), code=_code(error), param=param or None) from None


def _path(body: Any, error: Any) -> list[int | str]:
    """Where the error is, without the names that pydantic gives to the branches of a union."""
    path: list[int | str] = []
    here = body
    for i, step in enumerate(error["loc"]):
        if _has(here, step):
            here = here[step]
        elif error["type"] != "missing" or i < len(error["loc"]) - 1:
            continue  # a branch; a field that is missing is the last step
        path.append(step)
    return path


def _has(here: Any, step: int | str) -> bool:
    if isinstance(here, list):
        return isinstance(step, int) and 0 <= step < len(here)
    return isinstance(here, dict) and step in here


def _message(param: str, error: Any) -> str:
    if error["type"] == "missing":
        return f"Missing required parameter: '{param}'."
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"Invalid value for '{param}': {reason}, got {_SHORT.repr(error['input'])}."


def _code(error: Any) -> str:
    if error["type"] == "missing":
        return "missing_required_parameter"
    return "invalid_type" if error["type"].endswith("_type") else "invalid_value"


def unsupported(param: str) -> BadRequest:
    """For a known field that would change the answer and is not built."""
    return BadRequest(f"'{param}' is not supported by this server.", code="unsupported_parameter", param=param)


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _short_stops(stops: list[str] | None) -> list[str] | None:
    size = sum(map(len, stops or ()))
    if size > MAX_ALL_STOP_CHARACTERS:
        raise ValueError(f"should have at most {MAX_ALL_STOP_CHARACTERS} characters altogether, has {size}")
    return stops


def _token_biases(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"should have at most {MAX_BIASES} entries, has {len(value)}")
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise ValueError("should be keyed by token ids")
        biases[int(key)] = bias
    return biases


Int64 = Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_INT64)]
Items = Annotated[list[Any], Field(fail_fast=True, max_length=MAX_ITEMS)]


class RequestModel(BaseModel):
    """Strict: a boolean is no integer and a string no number; unknown names are ignored; null means the default."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class SamplingFields(RequestModel):
    """How the answer is drawn and where it ends; extras of vLLM included."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_biases)] = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=2**64 - 1)] | None = None
    stop: Annotated[
        Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None,
        BeforeValidator(_stop_list),
        AfterValidator(_short_stops),
    ] = None
    stop_token_ids: Annotated[list[Int64], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    """Holds back end and stop ids; a stop string ends the text whenever it comes."""
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    prompt_cache_key: str | None = Field(default=None, max_length=1024)
    user: str | None = Field(default=None, max_length=1024)
    safety_identifier: str | None = Field(default=None, max_length=1024)
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None

    # Known, not built, and each would change the answer.
    tools: Items | None = None
    tool_choice: Any = None
    functions: Items | None = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    bad_words: Items | None = None
    allowed_token_ids: Items | None = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    logits_processors: Any = None
    repetition_detection: Any = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def narrowing(self) -> Narrowing:
        """Who may share the request's KV. The end user is the request's own: a child does not inherit its parent's."""
        user = self.safety_identifier if self.safety_identifier is not None else self.user
        return Narrowing(self.cache_salt, self.prompt_cache_key, user)

    def refuse_unbuilt(self) -> Self:
        """Returns itself. Raises BadRequest with code `unsupported_parameter` where the answer would be another one."""
        for name in _UNBUILT:
            if _is_set(getattr(self, name)):
                raise unsupported(name)
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice")
        if self.function_call not in (None, "none", "auto"):
            raise unsupported("function_call")
        check_text_format(self.response_format, "response_format")
        return self

    def drawing_defaults(self, model_defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        """What holds where the request is silent."""
        return model_defaults

    def to_params(
        self,
        tokenizer: Tokenizer,
        model_defaults: Mapping[str, Any],
        max_tokens: int | None,
        *,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The engine's parameters; `max_tokens` None means all that the context leaves.

        `model_defaults` (generation_config.json) hold where the request is silent. Raises BadRequest.
        """
        defaults = self.drawing_defaults(model_defaults)
        chosen = {name: _first(getattr(self, name), defaults.get(name)) for name in _MODEL_DEFAULTS}
        chosen |= {name: getattr(self, name) for name in _OWN_DEFAULTS}
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        try:
            return params.validate(tokenizer.vocab_size)
        except RequestError as e:
            raise from_request_error(e) from None


_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OWN_DEFAULTS = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "n"),
)
_UNBUILT = (
    *("tools", "functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "json_schema", "structural_tag", "stop_regex", "bad_words"),
    *("allowed_token_ids", "truncate_prompt_tokens", "prompt_logprobs", "logits_processors", "repetition_detection"),
    "return_tokens_as_token_ids",
)


def check_text_format(value: Any, param: str) -> None:
    """Raises BadRequest unless `value` asks for plain text, which is all there is."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return
    if kind in ("json_object", "json_schema", "structural_tag", "grammar", "regex"):
        raise unsupported(param)
    raise BadRequest(f"Invalid value for '{param}': should be {{'type': 'text'}}.", code="invalid_value", param=param)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)
