"""Assistants: named system prompts whose KV many chats share."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from app.config import AssistantConfig, ConfigError
from app.scopes import Scopes
from app.template_options import TemplateOption, canonical
from app.tenants import Tenant
from engine.text.chat_template import ChatTemplate, Message, TemplateError


@dataclass(frozen=True)
class Assistant:
    id: str
    instructions: str = field(repr=False)
    tenant: str | None
    """None: offered to every tenant."""
    template_options: Mapping[str, TemplateOption] = field(repr=False)
    version: str
    """Another one for each text, template options and scope. Keyed: nobody can try texts against it."""
    trunk_ids: list[int] = field(repr=False)
    """Longest common prefix of all prompts that start with these instructions."""
    head_runs: Mapping[str, Sequence[int]] = field(repr=False, compare=False)
    """Ids of the texts that these instructions give to each prompt, so that they are not made anew for each."""
    scope_key: bytes = field(repr=False)

    def is_visible_to(self, tenant: Tenant) -> bool:
        return self.tenant is None or self.tenant == tenant.id


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
    content = json.dumps([config.instructions, canonical(config.template_options)])
    scope_key = scopes.assistant_key(config.tenant, config.id, content)
    if scope_key in known:
        return known[scope_key]
    head = [Message("system", config.instructions)]
    try:
        head_runs = template.head_runs(head, template_kwargs=config.template_options)
        trunk_ids = template.trunk_ids(head, known_runs=head_runs, template_kwargs=config.template_options)
    except TemplateError as e:
        raise ConfigError(f"assistants: {config.id!r}: {e.message}") from None
    return Assistant(
        id=config.id,
        instructions=config.instructions,
        tenant=config.tenant,
        template_options=config.template_options,
        version=sha256(scope_key).hexdigest()[:16],
        trunk_ids=trunk_ids,
        head_runs=head_runs,
        scope_key=scope_key,
    )


def trunk_id(assistant: Assistant) -> str:
    """`<assistant>@<version>.<tokenisation>`; the same in every gateway."""
    tokenisation = sha256(b"".join(token_id.to_bytes(4, "little") for token_id in assistant.trunk_ids))
    return f"{assistant.id}@{assistant.version}.{tokenisation.hexdigest()[:8]}"


def assistant_and_version(of_trunk: str) -> tuple[str, str]:
    """The assistant that the trunk of this id belongs to, and its version."""
    assistant_id, _, version = of_trunk.rpartition("@")
    return assistant_id, version.partition(".")[0]
