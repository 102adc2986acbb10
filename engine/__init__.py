"""The engine: continuous batching over a paged, prefix-shared KV cache.

`LLM`, `SamplingParams` and `BeamSearchParams` are loaded on first use, so that the gateway, which imports
`engine.protocol` and its neighbours, never loads torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.beam_search import BeamSearchParams
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

__all__ = ["LLM", "BeamSearchParams", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from engine.beam_search import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
