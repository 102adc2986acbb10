"""What Chat Completions and Completions have in common: the request's stream fields, usage, and the bytes of chunks."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from app.beam_request import BeamSearchFields
from app.errors import BadRequest
from app.generation import Generation
from app.request_params import RequestModel
from app.sse import DONE, escape_separators


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GeneratingRequest(BeamSearchFields):
    """The fields of both bodies. Names that change nothing are ignored."""

    model: str
    stream_options: StreamOptions | None = None

    def check_stream_options(self) -> None:
        """Raises BadRequest for options of a stream without a stream, as OpenAI does."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "'stream_options' is only allowed when 'stream' is true.", code="invalid_value", param="stream_options"
            )

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def usage_of(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object, and where cached tokens came from; numbers so far while the answer runs."""
    cached = generation.cached
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": cached.total,
            "cached_tokens_details": msgspec.structs.asdict(cached),
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@dataclass(frozen=True)
class AnswerHead:
    """What an answer and all chunks of a stream share."""

    id: str
    object: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Chunks:
    """Frames of one stream. What all chunks share is encoded once; a chunk costs its own text only."""

    def __init__(self, head: AnswerHead, generation: Generation, request: GeneratingRequest) -> None:
        self._open = b"data: " + escape_separators(orjson.dumps(head.as_dict())[:-1])
        self._generation = generation
        self._has_running_usage = request.has_running_usage
        # OpenAI: with include_usage all chunks but the last have a null here; without it the name is not there
        self._close = b'],"usage":null}\n\n' if request.includes_usage else b"]}\n\n"

    def chunk(self, choice: bytes, extra: bytes = b"") -> bytes:
        """One chunk with one choice (JSON). `extra`: further members, each with its comma in front."""
        close = self._close
        if self._has_running_usage:
            close = b'],"usage":%b}\n\n' % orjson.dumps(usage_of(self._generation))
        return b'%b%b,"choices":[%b%b' % (self._open, extra, choice, close)

    def usage_chunk(self) -> bytes:
        usage = orjson.dumps(usage_of(self._generation))
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._open, usage)


def json_value(value: Any) -> bytes:
    """Compact JSON in which no reader sees a line end."""
    return escape_separators(orjson.dumps(value))


__all__ = ["DONE", "AnswerHead", "Chunks", "GeneratingRequest", "StreamOptions", "json_value", "usage_of"]
