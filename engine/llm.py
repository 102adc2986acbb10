"""The engine in one process, without server or asyncio, as users of vLLM know it.

from engine import LLM, SamplingParams

llm = LLM(model="path/or/hub-id")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(result.outputs[0].text)
"""

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.beam_search import Beam, BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from engine.config import EngineConfig
from engine.device import resolve_device
from engine.errors import InvalidRequest, RequestError
from engine.model_runner import ModelRunner
from engine.models.fingerprint import resolve_dtype
from engine.models.prepare import prepare
from engine.offline_input import Conversation, Prompt, each_conversation, each_prompt
from engine.prepared import PreparedModel, default_state_dir
from engine.protocol import END, AddRequest, RequestOutput, Scope, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate, Message
from engine.text.detokenizer import PROMPT_SUFFIX_TOKENS, IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

SCOPE = Scope(END, b"offline")
"""One process has one user: everything may be shared."""


@dataclass
class Completion:
    """One of a prompt's `n` choices."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    """stop or length."""
    stop_reason: int | str | None = None
    """The stop string or stop id that ended it; None for the model's own end of turn."""


@dataclass
class GenerationResult:
    """What came of one prompt."""

    prompt: str | None
    """None if the prompt was given as ids."""
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass
class _Choice:
    """A running choice: where its ids and text go."""

    result: GenerationResult
    completion: Completion
    params: SamplingParams
    detokenizer: IncrementalDetokenizer


@dataclass(frozen=True)
class _Search:
    """A prompt's beam search."""

    index: int
    """Of the prompt."""
    prompt_ids: list[int]
    beams: BeamSearch


class LLM:
    """A model, its KV cache and its scheduler in this process.

    `model`: a Hugging Face directory, a hub id, a GGUF file, or the folder of a prepared model. Further keyword
    arguments are fields of `EngineConfig`. Raises ModelNotSupported and NotEnoughMemory, each in one sentence.
    """

    def __init__(self, model: str | Path, *, state_dir: str | Path | None = None, **engine: Any) -> None:
        if state_dir is not None:
            engine.setdefault("kernels_dir", str(Path(state_dir) / "kernels"))
        if (Path(model) / "manifest.json").is_file():
            prepared = PreparedModel.load(model)
        else:
            with _progress_bar() as progress:
                tasks: dict[str, Any] = {}

                def show(what: str, done: int, total: int) -> None:
                    if what not in tasks:
                        tasks[what] = progress.add_task(what, total=total)
                    progress.update(tasks[what], completed=done, total=total)

                folder = default_state_dir() if state_dir is None else Path(state_dir)
                dtype = resolve_dtype(engine.get("dtype", "auto"), resolve_device(engine.get("device", "auto")).type)
                prepared = prepare(str(model), folder, dtype, show)
        self.config = EngineConfig(model_dir=str(prepared.path), **engine)
        self._runner = runner = ModelRunner(prepared, self.config)
        self._core = runner.make_core()
        self.tokenizer = Tokenizer.load(prepared)
        source = prepared.chat_template
        self._template = None if source is None else ChatTemplate(source, self.tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Continues each prompt (text or ids); results come in the order of the prompts.

        Raises InvalidRequest or RequestTooLarge, naming the prompt's index, before anything is computed.
        """
        each = each_prompt(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        return self._run(texts, self._encode(each), sampling_params, use_tqdm, continues_text=True)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationResult]:
        """Answers one conversation, or each of several: lists of `{"role": ..., "content": ...}`.

        Raises InvalidRequest if the model has no chat template, TemplateError for what its template refuses.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use generate", param="messages")
        ids = [
            self._template.render(
                [Message(m["role"], m.get("content") or "") for m in conversation],
                add_generation_prompt=add_generation_prompt,
                template_kwargs=chat_template_kwargs,
            ).token_ids
            for conversation in each_conversation(messages)
        ]
        return self._run([None] * len(ids), ids, sampling_params, use_tqdm, continues_text=False)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The most probable continuations of each prompt that a search with so many beams finds.

        Raises InvalidRequest for the parameters; InvalidRequest or RequestTooLarge, naming the prompt's index.
        """
        params.validate()
        ids = self._encode(each_prompt(prompts))
        end_ids = frozenset(() if params.ignore_eos else self.tokenizer.eos_token_ids)
        limit = self._runner.info.max_sequence_tokens
        searches: list[_Search] = []
        for index, prompt_ids in enumerate(ids):
            num_left = max(1, limit - len(prompt_ids))  # a prompt that leaves nothing is refused when it is added
            max_tokens = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
            searches.append(_Search(index, prompt_ids, BeamSearch(params, len(prompt_ids), max_tokens, end_ids)))
        pending = deque(searches)
        # as many at once as may wait, so that none is refused for want of a place
        num_at_once = max(1, self.config.max_waiting // params.beam_width)
        running: dict[str, tuple[_Search, int]] = {}
        """Of each request under way: whose it is, and for which of the live beams."""
        try:
            for _ in range(min(num_at_once, len(pending))):
                self._submit_beams(pending.popleft(), running)
            while running:
                for output in self._core.step():
                    search, beam = running.pop(output.request_id)
                    if output.error is not None:
                        raise RequestError(output.error.message, code=output.error.code)
                    assert output.logprobs is not None, f"{output.request_id!r} came without log-probabilities"
                    if not search.beams.take(beam, output.logprobs[0]):
                        continue
                    if not search.beams.is_done:
                        self._submit_beams(search, running)
                    elif pending:
                        self._submit_beams(pending.popleft(), running)
        finally:
            self._core.abort(running)  # an error or Ctrl-C leaves nothing behind
        self._core.check_integrity()
        return [BeamSearchOutput([self._sequence(search, beam) for beam in search.beams.best()]) for search in searches]

    def _submit_beams(self, search: _Search, running: dict[str, tuple[_Search, int]]) -> None:
        for number, beam in enumerate(search.beams.live):
            request_id = self._new_request_id()
            request = AddRequest(
                request_id=request_id,
                prompt_ids=[*search.prompt_ids, *beam.token_ids],
                params=search.beams.step_params,
                scopes=[SCOPE],
                choice=min(1, len(beam.token_ids)),  # the prompt counts once in the cache's counters
            )
            self._add(search.index, request)
            running[request_id] = (search, number)

    def _sequence(self, search: _Search, beam: Beam) -> BeamSearchSequence:
        prompt_ids = search.prompt_ids
        detokenizer = IncrementalDetokenizer(self.tokenizer, prompt_suffix_ids=prompt_ids[-PROMPT_SUFFIX_TOKENS:])
        output_text = detokenizer.append(beam.text_ids) + detokenizer.finish()
        tokens = [*prompt_ids, *beam.text_ids]
        return BeamSearchSequence(
            tokens=tokens,
            text=self.tokenizer.decode(tokens, skip_special_tokens=False),
            cum_logprob=beam.cum_logprob,
            num_prompt_tokens=len(prompt_ids),
            output_text=output_text,
            finish_reason="length" if beam.stop_token_id is None else "stop",
            stop_reason=beam.stop_token_id,
        )

    def _encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        return [self.tokenizer.encode_completion(p) if isinstance(p, str) else p for p in prompts]

    def _new_request_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)

    def _add(self, index: int, request: AddRequest) -> None:
        """Raises RequestError, naming prompt `index`, for what the engine refuses."""
        refusal = self._core.add(request)
        if refusal is not None and refusal.error is not None:
            error = refusal.error
            raise RequestError(f"prompt {index}: {error.message}", code=error.code, param=error.param)

    def _run(
        self,
        texts: list[str | None],
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        *,
        continues_text: bool,
    ) -> list[GenerationResult]:
        """`continues_text`: the answer goes on in the middle of a text, so its first word may need its space."""
        per_prompt = _one_for_each(sampling_params, len(prompts))
        choices: dict[str, _Choice] = {}
        try:
            results = [
                self._submit(i, text, ids, params, continues_text, choices)
                for i, (text, ids, params) in enumerate(zip(texts, prompts, per_prompt, strict=True))
            ]
            with _progress_bar() if use_tqdm else nullcontext() as progress:
                task = progress.add_task("Processed prompts", total=len(choices)) if progress else None
                while choices:
                    for output in self._core.step():
                        if self._take(output, choices) and progress and task is not None:
                            progress.advance(task)
        finally:
            self._core.abort(choices)  # an error or Ctrl-C leaves nothing behind
        self._core.check_integrity()
        return results

    def _submit(
        self,
        index: int,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        continues_text: bool,
        choices: dict[str, _Choice],
    ) -> GenerationResult:
        params = msgspec.structs.replace(params, eos_token_ids=tuple(self.tokenizer.eos_token_ids))
        if params.n > 1 and params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        result = GenerationResult(text, ids, [Completion(i) for i in range(params.n)])
        for completion in result.outputs:
            request_id = self._new_request_id()
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_suffix_ids=ids[-PROMPT_SUFFIX_TOKENS:] if continues_text else (),
            )
            request = AddRequest(
                request_id=request_id, prompt_ids=ids, params=params, scopes=[SCOPE], choice=completion.index
            )
            self._add(index, request)
            choices[request_id] = _Choice(result, completion, params, detokenizer)
        return result

    def _take(self, output: RequestOutput, choices: dict[str, _Choice]) -> bool:
        """True if the choice has ended."""
        choice = choices.get(output.request_id)
        if choice is None:
            return False  # a stop string ended it in the step before
        if output.error is not None:
            raise RequestError(output.error.message, code=output.error.code)
        completion, detokenizer = choice.completion, choice.detokenizer
        completion.token_ids += output.token_ids
        if output.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + output.logprobs
        if output.num_cached_tokens is not None and completion.index == 0:
            choice.result.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            choice.result.prompt_logprobs = output.prompt_logprobs
        detokenizer.append(output.token_ids, stop_token_id=output.stop_token_id)
        if detokenizer.stop_string is None and output.finish_reason is None:
            return False
        detokenizer.finish()
        completion.text = detokenizer.text
        if detokenizer.stop_string is not None:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop_string
            self._core.abort([output.request_id])
        else:
            completion.finish_reason = str(output.finish_reason)
            if output.stop_token_id in choice.params.stop_token_ids:
                completion.stop_reason = output.stop_token_id
        del choices[output.request_id]
        return True


def _one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"one SamplingParams for each of {num_prompts} prompts, or one for all; got {len(sampling_params)}",
            param="sampling_params",
        )
    return list(sampling_params)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=False
    )
