"""Where a chat that has grown too long is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from app.truncation import STEPS, find_cuts, room_for_prompt
from engine.text.chat_template import Message
from tests.scripted_engine import byte_model_info


def chat(num_turns, *, head=()):
    turns = [m for i in range(num_turns) for m in (Message("user", f"q{i}"), Message("assistant", f"a{i}"))]
    return [*head, *turns, Message("user", "last")]


def test_an_answer_is_left_what_it_may_take_but_a_quarter_at_most():
    info = byte_model_info(max_model_len=1000)
    assert room_for_prompt(info, None) == 750
    assert room_for_prompt(info, 10) == 990
    assert room_for_prompt(info, 10_000) == 750


def test_whole_turns_go_in_large_steps_and_the_head_stays():
    messages = chat(20, head=[Message("system", "Be kind."), Message("developer", "Be brief.")])
    sizes = [10] * len(messages)
    cuts = list(find_cuts(messages, sizes, room=200))
    assert all(messages[cut].role == "user" for cut in cuts)
    # a step is 50 tokens, two and a half turns: 230 tokens have to go at least
    assert [messages[cut].content for cut in cuts] == ["q13", "q15", "q18", "last"]


def test_a_turn_is_all_that_was_said_before_the_next_answer_and_it():
    messages = [Message(role, "x") for role in ("user", "user", "assistant", "developer", "user", "assistant", "user")]
    assert list(find_cuts(messages, [1] * 7, room=8)) == [3, 6]


def test_the_last_turn_is_all_there_is_to_keep():
    assert list(find_cuts([Message("user", "x")], [9000], room=10)) == []
    assert list(find_cuts([Message("system", "x")], [9000], room=10)) == []
    assert list(find_cuts([], [], room=10)) == []


@given(st.lists(st.integers(1, 120), min_size=3, max_size=80), st.integers(8, 400))
def test_the_cut_moves_rarely_and_only_forward(turn_sizes, room):
    """A chat is sent again and again as it grows, and each time cut at the first place where the rest fits."""
    cuts = []
    for num_turns in range(1, len(turn_sizes)):
        messages = chat(num_turns)
        sizes = [size for turn in turn_sizes[:num_turns] for size in (turn, 0)] + [turn_sizes[num_turns]]
        if sum(sizes) <= room:
            continue
        fitting = [cut for cut in find_cuts(messages, sizes, room) if sum(sizes[cut:]) <= room]
        if fitting:
            cuts.append((fitting[0], fitting[0] == len(messages) - 1))
    places = [cut for cut, _ in cuts]
    assert places == sorted(places)
    # cuts other than the last turn's start are a step apart each
    moves = sorted({cut for cut, is_last in cuts if not is_last})
    step = max(1, room // STEPS)
    dropped = [sum(turn_sizes[: cut // 2]) for cut in moves]
    assert all(later // step > earlier // step for earlier, later in itertools.pairwise(dropped))
