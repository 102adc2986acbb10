"""Whether an engine could ever serve a prompt: asked before anything is submitted."""

from app.errors import ApiError, BadRequest, from_request_error
from app.prompts import BuiltPrompt
from engine.errors import RequestError
from engine.protocol import EngineInfo
from engine.sampling_params import SamplingParams


def check_servable(info: EngineInfo, prompt: BuiltPrompt, params: SamplingParams) -> None:
    """Raises ApiError (400) for what this engine can never serve."""
    try:
        params.validate(info.vocab_size)
    except RequestError as e:
        raise from_request_error(e) from None
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise BadRequest("The prompt is empty: there is nothing to continue.", param=prompt.param)
    if num_tokens >= info.max_model_len:
        raise _too_long(prompt, info.max_model_len, "The context length of this model is", params)
    if num_tokens + 1 > info.max_tokens_in_pool:
        raise _too_long(prompt, info.max_tokens_in_pool, "The KV cache of this server holds", params)
    if not all(0 <= t < info.vocab_size for t in prompt.token_ids[prompt.num_known_tokens :]):
        raise BadRequest(f"The prompt has token ids outside 0 to {info.vocab_size - 1}.", param=prompt.param)


def _too_long(prompt: BuiltPrompt, limit: int, what: str, params: SamplingParams) -> ApiError:
    num_tokens = len(prompt.token_ids)
    wanted = f" and {params.max_tokens} more were asked for" if params.max_tokens is not None else ""
    message = f"{what} {limit} tokens, but the prompt has {num_tokens} tokens{wanted}: shorten the prompt."
    return BadRequest(message, code="context_length_exceeded", param=prompt.param)
