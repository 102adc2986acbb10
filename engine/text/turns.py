"""What a chat template gets of each message, and what is tried when it refuses the roles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A message as the template gets it: every string guarded."""

    role: str
    content: str
    reasoning: str | None = None

    def joined(self, other: "Turn") -> "Turn":
        reasonings = [r for r in (self.reasoning, other.reasoning) if r is not None]
        return Turn(
            other.role if other.role == "user" else self.role,
            "\n\n".join(c for c in (self.content, other.content) if c),
            "\n\n".join(reasonings) if reasonings else None,
        )

    def to_dict(self) -> dict[str, str]:
        fields = {"role": self.role, "content": self.content}
        return fields if self.reasoning is None else fields | {"reasoning_content": self.reasoning}


def readings(turns: Sequence[Turn]) -> Iterator[Sequence[Turn]]:
    """`turns`, then what is tried if the template refuses them, from the least change to the greatest."""
    num_leading = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    for reading in (turns, [*turns[:num_leading], *_folded(turns[num_leading:])], _folded(turns)):
        yield reading
        yield _merged(reading)


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """Each system turn becomes the beginning of the user turn that follows, or a user turn if none does."""
    folded: list[Turn] = []
    waiting: Turn | None = None
    for turn in turns:
        if turn.role == "system":
            waiting = turn if waiting is None else waiting.joined(turn)
        elif turn.role == "user" and waiting is not None:
            folded.append(waiting.joined(turn))
            waiting = None
        else:
            folded.append(turn)
    if waiting is not None:
        folded.append(Turn("user", waiting.content))
    return folded


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbours of one role become one turn."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and merged[-1].role == turn.role:
            merged[-1] = merged[-1].joined(turn)
        else:
            merged.append(turn)
    return merged
