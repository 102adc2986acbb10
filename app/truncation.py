"""Which of a chat's oldest turns are left out where the whole of it is more than the model can read.

Whole turns go, in steps of a quarter of the room: the cut stays where it is until the chat has grown by that much, and
all prompts between two cuts begin alike, so that their KV is found again. The system messages that a chat begins with
stay, and so does its last turn. Where a cut lies follows from the messages before it alone; nothing is kept of it.
"""

from collections.abc import Iterator, Sequence

from app.heads import num_leading
from engine.protocol import EngineInfo
from engine.text.chat_template import Message

STEPS = 4
"""A cut takes this part of the room at least, and an answer without a limit is left as much."""


def room_for_prompt(info: EngineInfo, max_output_tokens: int | None) -> int:
    """How many tokens a prompt may have so that there is room for its answer too."""
    capacity = info.max_sequence_tokens
    share = max(1, capacity // STEPS)
    return capacity - min(max_output_tokens or share, share)


def find_cuts(messages: Sequence[Message], sizes: Sequence[int], room: int) -> Iterator[int]:
    """Indices of messages at which the chat may go on after its head, the ones that leave most first.

    `sizes`: tokens of each message's text, so that a prompt has at least as many as its messages together. Cuts that
    leave more than `room` by this count are not given, except the last one there is.
    """
    first = num_leading(messages)
    starts = [i for i in range(first + 1, len(messages)) if _begins_turn(messages, i)]
    step, threshold, dropped, at = max(1, room // STEPS), 0, 0, first
    total = sum(sizes)
    for start in starts:
        dropped += sum(sizes[at:start])
        at = start
        if start == starts[-1]:
            yield start
        elif dropped >= threshold + step:
            threshold = dropped // step * step
            if total - dropped <= room:
                yield start


def _begins_turn(messages: Sequence[Message], index: int) -> bool:
    return messages[index].role != "assistant" and messages[index - 1].role == "assistant"
