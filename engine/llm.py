"""The engine in one process, without server or asyncio, as users of vLLM know it.

from engine import LLM, SamplingParams

llm = LLM(model="path/or/hub-id")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(result.outputs[0].text)
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import InvalidRequest, RequestError
from engine.model_runner import ModelRunner, resolve_device
from engine.models.fingerprint import resolve_dtype
from engine.models.prepare import prepare
from engine.prepared import PreparedModel, default_state_dir
from engine.protocol import END, AddRequest, RequestOutput, Scope, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.chat_template import ChatTemplate, Message
from engine.text.detokenizer import PROMPT_SUFFIX_TOKENS, IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

SCOPE = Scope(END, b"offline")
"""One process has one user: everything may be shared."""

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str]]


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


class LLM:
    """A model, its KV cache and its scheduler in this process.

    `model`: a Hugging Face directory, a hub id, a GGUF file, or the folder of a prepared model. Further keyword
    arguments are fields of `EngineConfig`. Raises ModelNotSupported and NotEnoughMemory, each in one sentence.
    """

    def __init__(self, model: str | Path, *, state_dir: str | Path | None = None, **engine: Any) -> None:
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
        self._runner = ModelRunner(prepared, self.config)
        self._core = EngineCore(self.config, self._runner.info, self._runner, self._runner.identity)
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
        each = _prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        ids = [self.tokenizer.encode_completion(p) if isinstance(p, str) else list(p) for p in each]
        return self._run(texts, ids, sampling_params, use_tqdm, continues_text=True)

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
            for conversation in _conversations(messages)
        ]
        return self._run([None] * len(ids), ids, sampling_params, use_tqdm, continues_text=False)

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
            self._num_requests += 1
            request_id = str(self._num_requests)
            detokenizer = IncrementalDetokenizer(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_suffix_ids=ids[-PROMPT_SUFFIX_TOKENS:] if continues_text else (),
            )
            refusal = self._core.add(
                AddRequest(
                    request_id=request_id, prompt_ids=ids, params=params, scopes=[SCOPE], choice=completion.index
                )
            )
            if refusal is not None and refusal.error is not None:
                error = refusal.error
                raise RequestError(f"prompt {index}: {error.message}", code=error.code, param=error.param)
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


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    return [ids] if ids else [item for item in prompts if not isinstance(item, int)]


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    turns = [item for item in messages if isinstance(item, Mapping)]
    return [turns] if turns else [item for item in messages if not isinstance(item, Mapping)]


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
