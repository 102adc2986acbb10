"""What a request body says of a beam search: vLLM's `use_beam_search` and `length_penalty`, and its width."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from app.errors import BadRequest
from app.request_params import SamplingFields, unsupported
from engine.beam_search import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, BeamSearchParams

_CHANGES_NOTHING: dict[str, tuple[object, ...]] = {
    **{"temperature": (0,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,)},
    **{"frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "min_tokens": (0,)},
    **{"stop": ([],), "include_stop_str_in_output": (False,)},
}
"""Fields that would change how tokens are drawn or where text ends, and the values with which they do not."""


class BeamSearchFields(SamplingFields):
    """Beams are ranked by the model's own log-probabilities: what asks for a draw, or for other ones, is refused.

    A `seed` is taken, as the same search always finds the same. `stop_token_ids` and `ignore_eos` hold as ever.
    The width is `best_of`, of which the `n` best are the choices; without it, `n`.
    """

    use_beam_search: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    stream: bool | None = None

    @property
    def num_sequences(self) -> int:
        """That a prompt's answer needs at once: live beams, or choices."""
        return self.best_of or self.n or 1

    def to_beam_search(self) -> BeamSearchParams | None:
        """None without `use_beam_search`. Raises BadRequest that names what does not go with it."""
        num_choices = self.n or 1
        if not self.use_beam_search:
            if self.num_sequences != num_choices:
                raise unsupported("best_of")
            return None
        if self.stream:
            raise BadRequest(
                "'stream' is not supported with 'use_beam_search': which sequences are the best is known at the end.",
                code="unsupported_parameter",
                param="stream",
            )
        for name, values in _CHANGES_NOTHING.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise BadRequest(
                    f"'{name}' is not supported with 'use_beam_search', which ranks sequences by the model's own"
                    f" log-probabilities, got {value!r}.",
                    code="unsupported_parameter",
                    param=name,
                )
        param = "n" if self.best_of is None else "best_of"
        if self.num_sequences > MAX_BEAM_WIDTH:
            raise _invalid(param, f"a beam search has at most {MAX_BEAM_WIDTH} beams, got {self.num_sequences}")
        if self.num_sequences < num_choices:
            raise _invalid(param, f"should be at least n = {num_choices}, got {self.num_sequences}")
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamSearchParams(self.num_sequences, None, self.ignore_eos is True, penalty)

    def drawing_defaults(self, model_defaults: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's are for drawing: a beam search knows none of them."""
        return {"temperature": 0.0} if self.use_beam_search else model_defaults


def _invalid(param: str, reason: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {reason}.", code="invalid_value", param=param)
