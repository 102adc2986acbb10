"""Assistants: named system prompts whose KV many chats share."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from app.config import PLACEHOLDER, AssistantConfig, ConfigError
from app.errors import BadRequest
from app.scopes import Scopes
from app.template_options import TemplateOption, canonical
from app.tenants import Tenant
from engine.text.chat_template import TRUNK_PROBES, ChatTemplate, Message, TemplateError


@dataclass(frozen=True)
class Assistant:
    id: str
    instructions: str = field(repr=False)
    """With a placeholder `{{name}}` where the value of a variable goes."""
    variables: tuple[str, ...]
    """Names of those that each request gives; what the configuration fixes is in the instructions already."""
    tenant: str | None
    """None: offered to every tenant."""
    template_options: Mapping[str, TemplateOption] = field(repr=False)
    version: str
    """Another one for each text, template options and scope. Keyed: nobody can try texts against it."""
    trunk_ids: list[int] = field(repr=False)
    """Longest common prefix of all prompts that start with these instructions, whatever the variables are."""
    head_runs: Mapping[str, Sequence[int]] = field(repr=False, compare=False)
    """Ids of the texts that these instructions give to each prompt, so that they are not made anew for each. None where
    there are variables."""
    scope_key: bytes = field(repr=False)

    def is_visible_to(self, tenant: Tenant) -> bool:
        return self.tenant is None or self.tenant == tenant.id

    def filled(self, variables: Mapping[str, str]) -> str:
        """The instructions with these values. Raises BadRequest unless there is one for each variable, and no other."""
        missing = [name for name in self.variables if name not in variables]
        unknown = [name[:64] for name in variables if name not in self.variables]
        if missing or unknown:
            wrong = f"needs a value for {missing[0]!r}" if missing else f"takes no value for {unknown[0]!r}"
            raise BadRequest(
                f"The prompt {self.id!r} {wrong}: its variables are {list(self.variables)}.",
                code="invalid_prompt_variables",
                param="prompt.variables",
            )
        return _fill(self.instructions, variables)


class Assistants:
    """All assistants of the configuration."""

    def __init__(self, assistants: Iterable[Assistant] = ()) -> None:
        self._assistants = tuple(assistants)

    @classmethod
    def build(
        cls, configs: Iterable[AssistantConfig], template: ChatTemplate, scopes: Scopes, known: Iterable[Assistant] = ()
    ) -> "Assistants":
        """`known`: built before, with the same template; those that have not changed are taken over.

        Raises ConfigError where the template takes no such instructions or options.
        """
        by_scope_key = {assistant.scope_key: assistant for assistant in known}
        return cls(_assistant(config, template, scopes, by_scope_key) for config in configs)

    def __iter__(self) -> Iterator[Assistant]:
        return iter(self._assistants)

    def find(self, tenant: Tenant, assistant_id: str) -> Assistant | None:
        """None if there is none, or none that this tenant may see: nobody can tell the difference."""
        return next((a for a in self._assistants if a.id == assistant_id and a.is_visible_to(tenant)), None)

    def visible_to(self, tenant: Tenant) -> list[Assistant]:
        return [a for a in self._assistants if a.is_visible_to(tenant)]


def _assistant(
    config: AssistantConfig, template: ChatTemplate, scopes: Scopes, known: Mapping[bytes, Assistant]
) -> Assistant:
    instructions = _fill(config.instructions, config.fixed_variables)
    of_requests = [list(config.variables)] if config.variables else []
    content = json.dumps([instructions, canonical(config.template_options), *of_requests])
    scope_key = scopes.assistant_key(config.tenant, config.id, content)
    if scope_key in known:
        return known[scope_key]
    options = config.template_options
    # the values of variables are tried out like the user's texts: what is common to all is the trunk
    heads = [
        [Message("system", _fill(instructions, dict.fromkeys(config.variables, probe)))]
        for probe in (TRUNK_PROBES if config.variables else TRUNK_PROBES[:1])
    ]
    try:
        head_runs = {} if config.variables else template.head_runs(heads[0], template_kwargs=options)
        trunks = [template.trunk_ids(head, known_runs=head_runs, template_kwargs=options) for head in heads]
    except TemplateError as e:
        raise ConfigError(f"assistants: {config.id!r}: {e.message}") from None
    return Assistant(
        id=config.id,
        instructions=instructions,
        variables=config.variables,
        tenant=config.tenant,
        template_options=config.template_options,
        version=sha256(scope_key).hexdigest()[:16],
        trunk_ids=common_prefix(trunks),
        head_runs=head_runs,
        scope_key=scope_key,
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    """`text` with the values of those variables that there are; what stands in a value stays as it is."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1], match[0])

    return PLACEHOLDER.sub(value, text) if values else text


def common_prefix(sequences: Sequence[list[int]]) -> list[int]:
    """The longest one of all of them, of which there is one at least."""
    shortest, longest = min(sequences), max(sequences)
    common = next((i for i, (x, y) in enumerate(zip(shortest, longest, strict=False)) if x != y), len(shortest))
    return shortest[:common]


def trunk_id(assistant: Assistant) -> str:
    """`<assistant>@<version>.<tokenisation>`; the same in every gateway."""
    tokenisation = sha256(b"".join(token_id.to_bytes(4, "little") for token_id in assistant.trunk_ids))
    return f"{assistant.id}@{assistant.version}.{tokenisation.hexdigest()[:8]}"


def assistant_and_version(of_trunk: str) -> tuple[str, str]:
    """The assistant that the trunk of this id belongs to, and its version."""
    assistant_id, _, version = of_trunk.rpartition("@")
    return assistant_id, version.partition(".")[0]
