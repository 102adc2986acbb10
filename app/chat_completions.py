"""POST /v1/chat/completions: stateless chat, streamed or whole. Its client's going ends the work."""

import secrets
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.chat_request import ChatRequest
from app.chunks import DONE, AnswerHead, Chunks, json_value, usage_of
from app.disconnect import until_disconnect
from app.generation import ChoiceDelta, Generation
from app.json_body import read_json
from app.logprobs import chat_logprobs
from app.middleware import extras_of
from app.models import find_assistant_of_model, json_response
from app.prompts import BuiltPrompt
from app.request_params import parse_request
from app.services import Services
from app.sse import SseResponse, SseWriter
from engine.protocol import TokenLogprobs
from engine.text.tokenizer import Tokenizer


class ChatCompletions:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Everything that can be refused is refused before the first byte."""
        services, configured = self._services, self._services.current
        limits, tenant = configured.limits, configured.tenants.authenticate(request.headers.get("authorization"))
        chat = parse_request(ChatRequest, await read_json(request, limits.max_body_bytes))
        chat.check(limits)
        beams = chat.to_beam_search()
        assistant = find_assistant_of_model(services.model_name, configured.assistants, tenant, chat.model)
        params = chat.to_params(
            services.tokenizer,
            services.model.manifest.sampling_defaults,
            chat.token_limit,
            logprobs=chat.num_logprobs,
        )
        prompt = await services.prompts.build(
            tenant,
            chat.to_messages(),
            assistant=assistant,
            narrowing=chat.narrowing,
            template_options=chat.chat_template_kwargs,
            add_generation_prompt=chat.add_generation_prompt is not False,
            param="messages",
        )
        answer_id = f"chatcmpl-{secrets.token_hex(16)}"
        generation = services.generation(
            prompt, params, tenant, priority=chat.priority or 0, beams=beams, answer_id=answer_id
        )
        reservation = await services.rate_limits.reserve(tenant, generation.num_wanted_tokens)
        extras = extras_of(request)
        extras.headers.update(reservation.headers)
        extras.at_end.append(lambda: reservation.settle(generation.num_used_tokens))
        answer = ChatAnswer(services, chat, prompt, generation, answer_id)
        if chat.stream:
            return SseResponse(
                answer.stream, ping_interval_s=limits.ping_interval_s, send_timeout_s=limits.send_timeout_s
            )
        return json_response(await until_disconnect(request.receive, answer.whole()))


class ChatAnswer:
    """Writes one answer, as chunks or as a whole."""

    def __init__(
        self, services: Services, chat: ChatRequest, prompt: BuiltPrompt, generation: Generation, answer_id: str
    ) -> None:
        self._services = services
        self._tokenizer: Tokenizer = services.tokenizer
        self._chat = chat
        self._prompt = prompt
        self._generation = generation
        self._head = AnswerHead(
            id=answer_id,
            object="chat.completion.chunk" if chat.stream else "chat.completion",
            model=chat.model,
            system_fingerprint=f"fp_{services.model.manifest.fingerprint[:12]}",
        )

    async def stream(self, writer: SseWriter) -> None:
        """Role chunks of all choices with the first token, text, one finish chunk a choice, usage if asked, the end."""
        chunks = Chunks(self._head, self._generation, self._chat)
        with self._generation as generation:
            frames: list[bytes] | None = None
            async for deltas in generation:
                if frames is None:
                    frames = [self._role_chunk(chunks, i) for i in range(generation.num_choices)]
                for delta in deltas:
                    self._add_chunks(frames, chunks, delta)
                if frames:
                    await writer.write(b"".join(frames))
                    frames = []
            last = chunks.usage_chunk() + DONE if self._chat.includes_usage else DONE
        await writer.write(last)

    async def whole(self) -> dict[str, Any]:
        logprobs: list[list[dict[str, Any]]] = [[] for _ in range(self._generation.num_choices)]
        ends: dict[int, ChoiceDelta] = {}
        with self._generation as generation:
            async for deltas in generation:
                for delta in deltas:
                    logprobs[delta.index] += chat_logprobs(self._tokenizer, delta.logprobs or [], delta.end_logprobs)
                    if delta.finish_reason is not None:
                        ends[delta.index] = delta
                        self._remember(delta.index)
        answer = {
            **self._head.as_dict(),
            "choices": [self._choice(ends[i], logprobs[i]) for i in range(generation.num_choices)],
            "usage": usage_of(generation),
        }
        if self._chat.return_token_ids:
            answer["prompt_token_ids"] = self._prompt.token_ids
        return answer

    def _choice(self, end: ChoiceDelta, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": end.index,
            "message": {"role": "assistant", "content": self._generation.text(end.index), "refusal": None},
            "logprobs": {"content": logprobs, "refusal": None} if self._chat.logprobs else None,
            "finish_reason": end.finish_reason,
            "stop_reason": end.stop_reason,
        }
        if self._chat.return_token_ids:
            choice["token_ids"] = self._generation.output_ids(end.index)
        return choice

    def _role_chunk(self, chunks: Chunks, index: int) -> bytes:
        extra = b""
        if self._chat.return_token_ids and index == 0:
            extra = b',"prompt_token_ids":' + orjson.dumps(self._prompt.token_ids)
        delta = b'{"role":"assistant","content":""}'
        return chunks.chunk(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta), extra)

    def _add_chunks(self, frames: list[bytes], chunks: Chunks, delta: ChoiceDelta) -> None:
        """The delta's text, if it has any, then the end, if it is one."""
        ids = b""
        if self._chat.return_token_ids:
            ids = b',"token_ids":' + orjson.dumps(delta.token_ids)
        if delta.text or delta.logprobs or (ids and delta.token_ids):
            logprobs = self._logprobs(delta.logprobs or [])
            content = b'"delta":{"content":%b},"logprobs":%b' % (json_value(delta.text), logprobs)
            frames.append(chunks.chunk(b'{"index":%d,%b,"finish_reason":null%b}' % (delta.index, content, ids)))
        if delta.finish_reason is not None:
            self._remember(delta.index)
            end = (delta.index, self._logprobs([], delta.end_logprobs), delta.finish_reason.encode())
            frames.append(
                chunks.chunk(
                    b'{"index":%d,"delta":{},"logprobs":%b,"finish_reason":"%b","stop_reason":%b}'
                    % (*end, json_value(delta.stop_reason))
                )
            )

    def _logprobs(self, entries: list[TokenLogprobs], end: TokenLogprobs | None = None) -> bytes:
        if not entries and end is None:
            return b"null"
        return json_value({"content": chat_logprobs(self._tokenizer, entries, end), "refusal": None})

    def _remember(self, index: int) -> None:
        """A history that brings this answer back as text will find its ids."""
        generation = self._generation
        self._services.prompts.remember(self._prompt, generation.text(index), generation.kept_ids(index))
