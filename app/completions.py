"""POST /v1/completions: text that goes on, for one prompt or several."""

import secrets
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.chunks import DONE, AnswerHead, Chunks, GeneratingRequest, json_value, usage_of
from app.disconnect import until_disconnect
from app.errors import BadRequest
from app.generation import ChoiceDelta, Generation
from app.json_body import read_json
from app.logprobs import CompletionLogprobs
from app.middleware import extras_of
from app.models import find_assistant_of_model, json_response
from app.prompts import BuiltPrompt
from app.request_params import MaxTokens, parse_request, unsupported
from app.services import Services
from app.sse import SseResponse, SseWriter
from engine.protocol import TokenLogprobs
from engine.sampling_params import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GeneratingRequest):
    prompt: Any = None
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    # Known, not built, and each would change the answer.
    suffix: str | None = None
    prompt_embeds: Any = None

    def check(self) -> None:
        """Raises BadRequest for what the schema alone cannot say."""
        self.refuse_unbuilt()
        self.check_stream_options()
        if self.suffix:
            raise unsupported("suffix")
        if self.prompt_embeds:
            raise unsupported("prompt_embeds")

    def prompts(self) -> list[str | list[int]]:
        """A string, a list of strings, ids, or a list of lists of ids. Raises BadRequest."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            return [prompt]
        is_list = isinstance(prompt, list) and bool(prompt)
        if is_list and (all(isinstance(p, str) for p in prompt) or all(map(_is_ids, prompt))):
            return list(prompt)
        if prompt is None or prompt == []:
            raise BadRequest("Missing required parameter: 'prompt'.", code="missing_required_parameter", param="prompt")
        raise BadRequest(
            "Invalid value for 'prompt': should be a string, a list of strings, a list of token ids, or a list of lists"
            " of token ids.",
            code="invalid_value",
            param="prompt",
        )


def _is_ids(value: Any) -> bool:
    # `type` and not isinstance: a boolean is no token id
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


class Completions:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [Route("/v1/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        services, configured = self._services, self._services.current
        limits, tenant = configured.limits, configured.tenants.authenticate(request.headers.get("authorization"))
        body = parse_request(CompletionRequest, await read_json(request, limits.max_body_bytes))
        body.check()
        beams = body.to_beam_search()
        if find_assistant_of_model(services.model_name, configured.assistants, tenant, body.model) is not None:
            raise BadRequest("An assistant answers chats, not completions.", code="invalid_value", param="model")
        texts = body.prompts()
        if len(texts) * body.num_sequences > limits.max_choices:
            raise BadRequest(
                f"At most {limits.max_choices} choices are allowed, got {len(texts)} prompts with"
                f" {body.num_sequences} each.",
                code="invalid_value",
                param="prompt",
            )
        params = body.to_params(
            services.tokenizer,
            services.model.manifest.sampling_defaults,
            body.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        prompts = await services.prompts.build_completions(
            tenant,
            texts,
            narrowing=body.narrowing,
            add_special_tokens=body.add_special_tokens is not False,
        )
        answer_id = f"cmpl-{secrets.token_hex(16)}"
        generation = services.generation(
            prompts, params, tenant, priority=body.priority or 0, continues_text=True, beams=beams, answer_id=answer_id
        )
        reservation = await services.rate_limits.reserve(tenant, generation.num_wanted_tokens)
        extras = extras_of(request)
        extras.headers.update(reservation.headers)
        extras.at_end.append(lambda: reservation.settle(generation.num_used_tokens))
        answer = CompletionAnswer(services, body, prompts, generation, answer_id)
        if body.stream:
            return SseResponse(
                answer.stream, ping_interval_s=limits.ping_interval_s, send_timeout_s=limits.send_timeout_s
            )
        return json_response(await until_disconnect(request.receive, answer.whole()))


class CompletionAnswer:
    """Writes one answer, as chunks or as a whole."""

    def __init__(
        self,
        services: Services,
        body: CompletionRequest,
        prompts: list[BuiltPrompt],
        generation: Generation,
        answer_id: str,
    ) -> None:
        self._tokenizer = services.tokenizer
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._num_choices_per_prompt = body.n or 1
        hidden = services.tokenizer.hidden_ids if body.skip_special_tokens is not False else frozenset[int]()
        self._logprobs = [CompletionLogprobs(services.tokenizer, hidden) for _ in range(generation.num_choices)]
        self._is_begun = [False] * generation.num_choices
        self._head = AnswerHead(
            id=answer_id,
            object="text_completion",
            model=body.model,
            system_fingerprint=f"fp_{services.model.manifest.fingerprint[:12]}",
        )

    async def stream(self, writer: SseWriter) -> None:
        chunks = Chunks(self._head, self._generation, self._body)
        with self._generation as generation:
            async for deltas in generation:
                frames = [chunks.chunk(json_value(piece)) for piece in map(self._piece, deltas) if piece is not None]
                if frames:
                    await writer.write(b"".join(frames))
            last = chunks.usage_chunk() + DONE if self._body.includes_usage else DONE
        await writer.write(last)

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[dict[str, Any]]] = [[] for _ in range(self._generation.num_choices)]
        with self._generation as generation:
            async for deltas in generation:
                for piece in map(self._piece, deltas):
                    if piece is not None:
                        pieces[piece["index"]].append(piece)
        return {
            **self._head.as_dict(),
            "choices": [_joined(p) for p in pieces],
            "usage": usage_of(generation),
        }

    def _piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The choice object of one chunk; None where the delta has nothing to show yet."""
        text = delta.text
        entries: list[TokenLogprobs | None] | None = None if delta.logprobs is None else [*delta.logprobs]
        prompt = self._prompts[delta.index // self._num_choices_per_prompt]
        is_first = not self._is_begun[delta.index]
        self._is_begun[delta.index] = True
        if is_first and self._body.echo:
            text = self._prompt_text(prompt) + text
            if entries is not None:
                entries = [*(self._generation.prompt_logprobs(delta.index) or []), *entries]
        logprobs = None
        if entries is not None:
            logprobs = self._logprobs[delta.index].add(entries, first_id=prompt.token_ids[0])
        has_ids = bool(self._body.return_token_ids and delta.token_ids)
        if not (text or delta.finish_reason or entries or has_ids):
            return None
        piece: dict[str, Any] = {
            "index": delta.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            piece["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            piece["token_ids"] = delta.token_ids
            if is_first:
                piece["prompt_token_ids"] = prompt.token_ids
        return piece

    def _prompt_text(self, prompt: BuiltPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._body.skip_special_tokens is not False)


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the pieces of one stream make together."""
    first, last = pieces[0], pieces[-1]
    whole = {**first, **last, "text": "".join(p["text"] for p in pieces)}
    lists = [p["logprobs"] for p in pieces if p["logprobs"] is not None]
    if lists:
        whole["logprobs"] = {name: [v for part in lists for v in part[name]] for name in lists[0]}
    if "token_ids" in last:
        whole["token_ids"] = [t for p in pieces for t in p["token_ids"]]
    return whole
