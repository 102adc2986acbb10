"""From messages to token ids and the scopes of their KV."""

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from app.assistants import Assistant
from app.errors import BadRequest
from app.heads import Head, Heads, num_leading
from app.scopes import NOT_NARROWED, Narrowing, Scopes
from app.template_options import TemplateOption, digest, merged
from app.tenants import Tenant
from app.token_lru import TokenLru
from engine.errors import RequestError
from engine.protocol import END, Scope
from engine.text.chat_template import ChatTemplate, Message, RenderedPrompt
from engine.text.tokenizer import Tokenizer

THREAD_FROM_CHARACTERS = 8192
"""Longer texts are rendered and encoded in a thread, so that the event loop goes on."""
CHARACTERS_OF_A_MESSAGE = 64
"""What the markup of a message costs, in characters of text."""
MAX_KEPT_TOKENS = 1 << 20
MAX_KEPT_ANSWERS = 1 << 16

T = TypeVar("T")


@dataclass(frozen=True)
class BuiltPrompt:
    """What the engine is asked to continue."""

    token_ids: list[int]
    scopes: list[Scope]
    param: str = "prompt"
    """The field of the request that it was made from, for errors."""
    text: str | None = field(default=None, repr=False)
    """Of a completion: the prompt as it was given, for `echo`."""
    owner_key: bytes = field(default=b"", repr=False)
    """Whose it is: what is said about it is compared with prompts of the same owner only."""
    assistant_id: str | None = None
    assistant_version: str | None = None
    num_trunk_tokens: int = 0
    """Of the assistant's trunk, whether the prompt begins with all of it or not."""
    num_known_tokens: int = 0
    """Leading ones that were encoded here, for a head: they need not be looked at again."""
    template_changed: bool = False
    """Ids of an answer in it had to be made from its text anew, as the template did not take them."""
    template_digest: str = ""
    """Of the options that the chat template was given, the assistant's and the request's; "" where there were none."""

    @property
    def private_key(self) -> bytes:
        """The scope of everything after the trunk."""
        return self.scopes[-1].key


class KeptAnswers:
    """Ids of answers that were given, by scope and text: a history that comes back as text finds its own ids again.

    Bounded: the answers that were used least recently go first.
    """

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS, max_answers: int = MAX_KEPT_ANSWERS) -> None:
        self._ids: TokenLru[array[int]] = TokenLru(max_tokens, max_answers)

    def __len__(self) -> int:
        return len(self._ids)

    def remember(self, scope_key: bytes, text: str, token_ids: Sequence[int]) -> None:
        if token_ids:
            self._ids.put(self._key(scope_key, text), array("I", token_ids), len(token_ids))

    def take(self, scope_key: bytes, text: str) -> tuple[int, ...] | None:
        """The ids of this answer, which is now the one used last; None if they are not known (any more)."""
        ids = self._ids.use(self._key(scope_key, text))
        return None if ids is None else tuple(ids)

    @staticmethod
    def _key(scope_key: bytes, text: str) -> bytes:
        return hashlib.sha256(len(scope_key).to_bytes(2, "little") + scope_key + text.encode()).digest()


class PromptBuilder:
    """Renders and encodes. Raises ApiError (400) for what the template refuses."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, scopes: Scopes) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._scopes = scopes
        self._kept = KeptAnswers()
        self._heads = Heads(template)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prompts")

    async def build(
        self,
        tenant: Tenant,
        messages: Sequence[Message],
        *,
        assistant: Assistant | None = None,
        variables: Mapping[str, str] | None = None,
        narrowing: Narrowing = NOT_NARROWED,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, TemplateOption] | None = None,
        param: str = "input",
    ) -> BuiltPrompt:
        """The prompt of a chat. The assistant's instructions come first, as a system message of their own, with a value
        for each of its `variables`.

        `template_options` go before the assistant's own. `param`: the field of the request that holds the messages, for
        errors.
        An answer without kept ids whose text this server gave in the same scope gets its ids back. The system messages
        that a request begins with end a scope of their own, so that chats which repeat them share them to the token.
        """
        private = self._scopes.private_key(tenant, narrowing)
        whole = [self._with_kept_ids(private, m) for m in messages]
        options = merged(assistant.template_options if assistant is not None else None, template_options)
        options_digest = digest(options)
        num_own = num_leading(whole)
        if assistant is not None:
            whole.insert(0, Message("system", assistant.filled(variables or {})))
            # instructions that are the same for all need no head of their own: the trunk is theirs
            num_own += 1 if num_own or assistant.variables else 0
        own = whole[:num_own]
        head_key = self._heads.key(private, own, options_digest)
        known = self._heads.find(head_key)
        is_new = bool(own) and known is None

        def render() -> tuple[Head | None, RenderedPrompt]:
            runs = assistant.head_runs if assistant is not None else {}
            head = self._heads.try_make(own, runs, options) if is_new else known
            runs = head.runs if head is not None else runs
            return head, self._template.render(
                whole, add_generation_prompt=add_generation_prompt, known_runs=runs, template_kwargs=options
            )

        num_encoded = num_own if known is not None else 0 if assistant is None else 1
        texts = [*whole[num_encoded:], *(own if is_new else ())]
        head, rendered = await self._run(render, [len(m.content) for m in texts], param)
        if is_new and head is not None:
            self._heads.keep(head_key, head)
        scopes = _scopes_of(rendered.token_ids, assistant, head, private)
        return BuiltPrompt(
            rendered.token_ids,
            scopes,
            param,
            owner_key=self._scopes.owner_key(tenant, narrowing.user),
            assistant_id=assistant.id if assistant is not None else None,
            assistant_version=assistant.version if assistant is not None else None,
            num_trunk_tokens=len(assistant.trunk_ids) if assistant is not None else 0,
            num_known_tokens=scopes[-2].end_token if len(scopes) > 1 else 0,
            template_changed=bool(rendered.template_changed),
            template_digest=options_digest,
        )

    async def build_completions(
        self,
        tenant: Tenant,
        prompts: Sequence[str | list[int]],
        *,
        narrowing: Narrowing = NOT_NARROWED,
        add_special_tokens: bool = True,
    ) -> list[BuiltPrompt]:
        """Prompts of completions: text, encoded with BOS where the model wants one, or ids as they are."""
        scopes = [Scope(END, self._scopes.private_key(tenant, narrowing))]
        owner_key = self._scopes.owner_key(tenant, narrowing.user)
        encode = self._tokenizer.encode_completion if add_special_tokens else self._tokenizer.encode

        def encode_all() -> list[BuiltPrompt]:
            return [
                BuiltPrompt(encode(prompt), scopes, text=prompt, owner_key=owner_key)
                if isinstance(prompt, str)
                else BuiltPrompt(prompt, scopes, owner_key=owner_key)
                for prompt in prompts
            ]

        return await self._run(encode_all, [len(p) for p in prompts if isinstance(p, str)], "prompt")

    def trunk_prompt(self, assistant: Assistant) -> BuiltPrompt:
        """What is prefilled for an assistant: its trunk, all of it in the assistant's scope."""
        return BuiltPrompt(list(assistant.trunk_ids), [Scope(END, assistant.scope_key)])

    async def message_sizes(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of each message's own text."""

        def count() -> list[int]:
            return [
                len(m.token_ids if m.token_ids is not None else self._tokenizer.encode(m.content)) for m in messages
            ]

        return await self._run(count, [len(m.content) for m in messages], "input")

    def remember(self, prompt: BuiltPrompt, text: str, token_ids: Sequence[int]) -> None:
        """Keeps the ids of an answer, so that a history with its text renders to the same ids."""
        self._kept.remember(prompt.private_key, text, token_ids)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _with_kept_ids(self, private: bytes, message: Message) -> Message:
        if message.role != "assistant" or message.token_ids is not None:
            return message
        return replace(message, token_ids=self._kept.take(private, message.content))

    async def _run(self, work: Callable[[], T], text_lengths: Sequence[int], param: str) -> T:
        """In a thread if it is long: by the characters of all texts, and by how many texts there are."""
        try:
            if sum(text_lengths) + CHARACTERS_OF_A_MESSAGE * len(text_lengths) <= THREAD_FROM_CHARACTERS:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RequestError as e:
            code = None if e.code == "invalid_request" else e.code
            at_fault = e.param if e.param == "chat_template_kwargs" else param
            raise BadRequest(e.message, code=code, param=at_fault) from None


def _scopes_of(token_ids: list[int], assistant: Assistant | None, head: Head | None, private: bytes) -> list[Scope]:
    """The trunk is the assistant's; all that follows is private, with a mark where the head ends."""
    scopes = []
    shared = num_common(assistant.trunk_ids, token_ids) if assistant else 0
    if assistant and shared:
        scopes.append(Scope(shared, assistant.scope_key))
    end = num_common(head.token_ids, token_ids) if head else 0
    if shared < end < len(token_ids):
        scopes.append(Scope(end, private))
    return [*scopes, Scope(END, private)]


def num_common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    if a == b[: len(a)]:
        return len(a)  # nearly always, and then many times faster than token by token
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
