"""Prompts of late and their answers, as ids: what a request is compared with to say why no more of it was cached.

In this process's memory only, and bounded: the oldest go first. A request is compared with those of its own owner: the
tenant, or one end user of a tenant that is scoped by user.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.prompts import BuiltPrompt
from engine.protocol import Scope

CHUNK_TOKENS = 16
"""Grain of the index: of those that have as many whole chunks in common with a prompt, the newest is found."""
MAX_TENANT_TOKENS = 1 << 18
MAX_TOKENS = 1 << 21
"""Of all tenants together."""
MIN_RECORD_TOKENS = 32
"""A shorter record counts as one of so many: each takes half a kilobyte beside its ids."""
_BYTES = array("I").itemsize


@dataclass(frozen=True, eq=False, slots=True)
class PromptRecord:
    """A prompt, alone or with its answer."""

    owner_key: bytes = field(repr=False)
    private_key: bytes = field(repr=False)
    trunk: Scope | None = field(repr=False)
    """The scope of its beginning, if that is an assistant's."""
    assistant_id: str | None
    assistant_version: str | None
    num_trunk_tokens: int
    """Of the assistant's trunk, whether the prompt begins with all of it or not."""
    template_digest: str
    template_changed: bool
    ends: tuple[int, ...]
    """Where the engine was to publish a tail, ascending: others of the scope can go on from there, to the token."""
    num_computed_tokens: int
    """Of which the KV was written for sure: not that of the token that was drawn last."""
    ids: bytes = field(repr=False)
    """Each a native unsigned int."""

    @classmethod
    def of(cls, prompt: BuiltPrompt, output_ids: Sequence[int] = (), *, ended: bool = False) -> "PromptRecord":
        """`ended`: the engine drew the last of `output_ids` and stopped, so that the turn's tail ends before it."""
        first, last = prompt.scopes[0], prompt.scopes[-1]
        num_prompt_tokens = len(prompt.token_ids)
        num_tokens = num_prompt_tokens + len(output_ids)
        num_computed_tokens = num_tokens - 1 if output_ids else num_prompt_tokens
        ends = [scope.end_token for scope in prompt.scopes if scope.end_token < num_prompt_tokens]
        ends += [num_prompt_tokens, num_computed_tokens] if ended else [num_prompt_tokens]
        return cls(
            owner_key=prompt.owner_key,
            private_key=last.key,
            trunk=first if first.key != last.key else None,
            assistant_id=prompt.assistant_id,
            assistant_version=prompt.assistant_version,
            num_trunk_tokens=prompt.num_trunk_tokens,
            template_digest=prompt.template_digest,
            template_changed=prompt.template_changed,
            ends=tuple(ends),
            num_computed_tokens=num_computed_tokens,
            ids=(array("I", prompt.token_ids) + array("I", output_ids)).tobytes(),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // _BYTES

    @property
    def size_tokens(self) -> int:
        """What it counts for in the bounds."""
        return max(self.num_tokens, MIN_RECORD_TOKENS)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Those in the range that there are."""
        return list(array("I", self.ids[max(start, 0) * _BYTES : stop * _BYTES]))

    def num_common_tokens(self, other: "PromptRecord") -> int:
        """Length of the longest common prefix of both."""
        low, high = 0, min(self.num_tokens, other.num_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if self.ids[low * _BYTES : middle * _BYTES] == other.ids[low * _BYTES : middle * _BYTES]:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class Comparison:
    """What its owner had asked before a prompt was submitted."""

    prompt: PromptRecord
    in_scope: PromptRecord | None = None
    """What has most in common with it in its own private scope."""
    in_any_scope: PromptRecord | None = None
    of_assistant: PromptRecord | None = None
    """The latest with the same assistant."""


class PromptHistory:
    """All tenants' records. Nothing of one is ever compared with another's."""

    def __init__(self, max_tenant_tokens: int = MAX_TENANT_TOKENS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tenant_tokens = max_tenant_tokens
        self._max_tokens = max_tokens
        self._size_tokens = 0
        self._tenants: OrderedDict[str, _TenantRecords] = OrderedDict()
        """The one that was active last comes last."""

    @property
    def size_tokens(self) -> int:
        return self._size_tokens

    def add(self, tenant_id: str, record: PromptRecord) -> None:
        if record.size_tokens > self._max_tenant_tokens:
            return
        records = self._tenants.setdefault(tenant_id, _TenantRecords())
        self._tenants.move_to_end(tenant_id)
        records.add(record)
        self._size_tokens += record.size_tokens
        while records.size_tokens > self._max_tenant_tokens:
            self._size_tokens -= records.forget_oldest()
        while self._size_tokens > self._max_tokens:
            tenant_id, records = next(iter(self._tenants.items()))
            self._size_tokens -= records.forget_oldest()
            if not records.size_tokens:
                del self._tenants[tenant_id]

    def compare(self, tenant_id: str, prompt: PromptRecord) -> Comparison:
        records = self._tenants.get(tenant_id)
        return records.compare(prompt) if records is not None else Comparison(prompt)


class _TenantRecords:
    """Those of one tenant, indexed from the first comparison on: a tenant that never asks for one pays for none.

    The index maps the hash of a record's beginning, in whole chunks, to the newest record with it; so the beginning of
    a prompt that is known is found by bisection. What is found is compared token by token, so that hashes that are
    equal by chance do no harm.
    """

    def __init__(self) -> None:
        self.size_tokens = 0
        self._records: deque[PromptRecord] = deque()
        self._newest: dict[int, PromptRecord] = {}
        self._of_assistant: dict[tuple[bytes, str], PromptRecord] = {}
        self._is_indexed = False

    def add(self, record: PromptRecord) -> None:
        self._records.append(record)
        self.size_tokens += record.size_tokens
        if self._is_indexed:
            self._index(record)

    def forget_oldest(self) -> int:
        """What it counted for, in tokens."""
        record = self._records.popleft()
        self.size_tokens -= record.size_tokens
        if self._is_indexed:
            beginnings = _beginnings(record)
            for key in (*beginnings, *_in_scope(beginnings, record)):
                if self._newest.get(key) is record:
                    del self._newest[key]
            if record.assistant_id is not None:
                assistant = record.owner_key, record.assistant_id
                if self._of_assistant.get(assistant) is record:
                    del self._of_assistant[assistant]
        return record.size_tokens

    def compare(self, prompt: PromptRecord) -> Comparison:
        if not self._is_indexed:
            self._is_indexed = True
            for record in self._records:
                self._index(record)
        beginnings = _beginnings(prompt)
        of_assistant = None
        if prompt.assistant_id is not None:
            of_assistant = self._of_assistant.get((prompt.owner_key, prompt.assistant_id))
        in_any_scope, in_scope = self._find(beginnings), self._find(_in_scope(beginnings, prompt))
        if in_any_scope is not None and in_any_scope.owner_key != prompt.owner_key:
            in_any_scope = None
        if in_scope is not None and in_scope.private_key != prompt.private_key:
            in_scope = None
        return Comparison(prompt, in_scope, in_any_scope, of_assistant)

    def _index(self, record: PromptRecord) -> None:
        beginnings = _beginnings(record)
        self._newest.update(dict.fromkeys(beginnings, record))
        self._newest.update(dict.fromkeys(_in_scope(beginnings, record), record))
        if record.assistant_id is not None:
            self._of_assistant[record.owner_key, record.assistant_id] = record

    def _find(self, beginnings: Sequence[int]) -> PromptRecord | None:
        """Whoever has a long beginning has the shorter ones too, and those lead to it or to somebody newer."""
        newest = self._newest
        num_known = bisect_left(beginnings, True, key=lambda key: key not in newest)
        return newest[beginnings[num_known - 1]] if num_known else None


def _beginnings(record: PromptRecord) -> list[int]:
    """Hashes of the record's owner with its first 0, 1, ... whole chunks."""
    ids, size = record.ids, CHUNK_TOKENS * _BYTES
    beginning = hash(record.owner_key)
    hashes = [beginning]
    for start in range(0, len(ids) - size + 1, size):
        beginning = hash((beginning, ids[start : start + size]))
        hashes.append(beginning)
    return hashes


def _in_scope(beginnings: Sequence[int], record: PromptRecord) -> list[int]:
    """The same for those of the record's private scope."""
    scope = hash(record.private_key)
    return [beginning ^ scope for beginning in beginnings]
