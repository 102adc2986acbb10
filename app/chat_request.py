"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.chunks import GeneratingRequest
from app.errors import BadRequest
from app.limits import Limits
from app.request_params import Items, MaxTokens, RequestModel, unsupported
from app.template_options import TemplateOptions
from engine.sampling_params import MAX_LOGPROBS
from engine.text.chat_template import Message

MAX_PARTS = 4096


class ContentPart(RequestModel):
    type: str
    text: str | None = None
    refusal: str | None = None

    def to_text(self, param: str) -> str:
        """Raises BadRequest for what is no text: nothing is dropped in silence."""
        if self.type == "text" and self.text is not None:
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        if self.type in ("text", "refusal"):
            raise BadRequest(f"Missing required parameter: '{param}.{self.type}'.", param=f"{param}.{self.type}")
        raise BadRequest(
            f"Invalid value for '{param}.type': this model takes text only, got {self.type[:100]!r}.",
            code="invalid_value",
            param=f"{param}.type",
        )


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Items | None = None
    function_call: Any = None
    audio: Any = None

    def to_message(self, index: int) -> Message:
        """The parts of a content are one text, put together with nothing between. Raises BadRequest."""
        param = f"messages[{index}]"
        if self.role in ("tool", "function"):
            raise unsupported(f"{param}.role")
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(self, name):
                raise unsupported(f"{param}.{name}")
        if self.content is None and self.role != "assistant":
            raise BadRequest(
                f"Missing required parameter: '{param}.content'.",
                code="missing_required_parameter",
                param=f"{param}.content",
            )
        if isinstance(self.content, list):
            return Message(self.role, "".join(p.to_text(f"{param}.content[{i}]") for i, p in enumerate(self.content)))
        return Message(self.role, self.content or self.refusal or "")


class ChatRequest(GeneratingRequest):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    # Known, not built, and each would change the answer.
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    chat_template: Any = None
    documents: Items | None = None
    reasoning_effort: Any = None
    thinking_token_budget: Any = None
    modalities: Annotated[list[str], Field(fail_fast=True, max_length=8)] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Any = None

    def check(self, limits: Limits) -> None:
        """Raises BadRequest for what the schema alone cannot say."""
        self.refuse_unbuilt()
        self.check_stream_options()
        for name in _UNBUILT:
            if getattr(self, name):
                raise unsupported(name)
        if self.reasoning_effort not in (None, "none"):
            raise unsupported("reasoning_effort")
        if self.verbosity not in (None, "medium"):
            raise unsupported("verbosity")
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.", code="invalid_value", param="top_logprobs"
            )
        for param, number, limit in (
            ("messages", len(self.messages), limits.max_messages),
            ("n", self.num_sequences, limits.max_choices),
        ):
            if number > limit:
                raise BadRequest(
                    f"Invalid value for '{param}': at most {limit} are allowed, got {number}.",
                    code="invalid_value",
                    param=param,
                )

    @property
    def token_limit(self) -> int | None:
        """None: all that the context leaves."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_messages(self) -> list[Message]:
        return [m.to_message(i) for i, m in enumerate(self.messages)]


_UNBUILT = (
    *("continue_final_message", "add_special_tokens", "echo", "chat_template", "documents"),
    *("thinking_token_budget", "audio", "web_search_options"),
)
