"""Assistants: named system prompts whose KV many chats share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from app.config import AssistantConfig
from app.scopes import Scopes
from app.tenants import Tenant
from engine.text.chat_template import ChatTemplate, Message


@dataclass(frozen=True)
class Assistant:
    id: str
    instructions: str = field(repr=False)
    tenant: str | None
    """None: offered to every tenant."""
    trunk_ids: tuple[int, ...] = field(repr=False)
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
    def build(cls, configs: Iterable[AssistantConfig], template: ChatTemplate, scopes: Scopes) -> "Assistants":
        """Raises TemplateError where the template takes no such instructions."""
        return cls(_assistant(config, template, scopes) for config in configs)

    def __iter__(self) -> Iterator[Assistant]:
        return iter(self._assistants)

    def find(self, tenant: Tenant, assistant_id: str) -> Assistant | None:
        """None if there is none, or none that this tenant may see: nobody can tell the difference."""
        return next((a for a in self._assistants if a.id == assistant_id and a.is_visible_to(tenant)), None)

    def visible_to(self, tenant: Tenant) -> list[Assistant]:
        return [a for a in self._assistants if a.is_visible_to(tenant)]


def _assistant(config: AssistantConfig, template: ChatTemplate, scopes: Scopes) -> Assistant:
    head = [Message("system", config.instructions)]
    head_runs = template.head_runs(head)
    return Assistant(
        id=config.id,
        instructions=config.instructions,
        tenant=config.tenant,
        trunk_ids=tuple(template.trunk_ids(head, known_runs=head_runs)),
        head_runs=head_runs,
        scope_key=scopes.assistant_key(config.tenant, config.id, config.instructions),
    )
