import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop_strings import StopAutomaton, StopStrings


def run(stops: list[str], pieces: list[str], **kwargs: bool) -> tuple[str, str | None]:
    scanner = StopStrings(stops, **kwargs)
    shown = [scanner.feed(piece) for piece in pieces]
    return "".join(shown) + scanner.flush(), scanner.matched


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def all_splits(text: str) -> list[list[str]]:
    splits = []
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces = [text[0]]
        for cut, character in zip(cuts, text[1:], strict=True):
            if cut:
                pieces.append(character)
            else:
                pieces[-1] += character
        splits.append(pieces)
    return splits


def test_b15_a_stop_that_spans_pieces_is_found_and_nothing_of_it_shown() -> None:
    for pieces in all_splits("abcSTOPde"):
        scanner = StopStrings(["STOP"])
        shown = ""
        for piece in pieces:
            shown += scanner.feed(piece)
            assert "abc".startswith(shown)
        assert (shown + scanner.flush(), scanner.matched) == ("abc", "STOP")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ST", "STOP"], "abSTOPcd", ("ab", "ST")),
        (["STOP", "ST"], "abSTOPcd", ("ab", "ST")),
        (["OP", "STOP"], "abSTOPcd", ("ab", "STOP")),
        (["STOPPED", "TO"], "abSTOPcd", ("abS", "TO")),
        (["aab"], "aaaabc", ("aa", "aab")),
        (["?!"], "What?", ("What?", None)),
        (["\n\n"], "one\n", ("one\n", None)),
    ],
)
def test_b15_two_stops_and_overlaps(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    for pieces in all_splits(text):
        assert run(stops, pieces) == expected


def test_b15_only_what_could_still_become_a_stop_is_held_back() -> None:
    scanner = StopStrings(["STOP", "<|x|>"])
    assert [scanner.feed(piece) for piece in ("ab", "cS", "TO", "S", "T!", "a <|", "|")] == [
        "ab",
        "c",
        "",
        "STO",
        "ST!",
        "a ",
        "<||",
    ]


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_b15_shown_and_held_are_the_text_and_the_held_part_is_the_longest_possible_start_of_a_stop(
    stops: list[str], pieces: list[str]
) -> None:
    scanner = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += scanner.feed(piece)
        if scanner.matched is not None:
            assert (shown, scanner.matched) == naive(stops, seen)
            return
        starts = [seen[-n:] for n in range(1, len(seen) + 1) if any(s.startswith(seen[-n:]) for s in stops)]
        assert seen == shown + max(starts, key=len, default="")
    assert (shown + scanner.flush(), None) == naive(stops, seen)


def test_b16_what_was_held_back_is_released_at_the_end() -> None:
    assert run(["?!"], list("What?")) == ("What?", None)


def test_b16_streamed_equals_whole_for_200_random_stop_sets() -> None:
    draw = random.Random(16)
    for _ in range(200):
        stops = ["".join(draw.choices("abx \n", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 4))]
        text = "".join(draw.choices("abx \n", k=40))
        cuts = sorted(draw.sample(range(1, 40), draw.randint(0, 12)))
        pieces = [text[i:j] for i, j in itertools.pairwise([0, *cuts, 40])]
        assert run(stops, pieces) == run(stops, [text]) == naive(stops, text)


def test_a_stop_can_be_shown() -> None:
    for pieces in all_splits("abSTOPcd"):
        assert run(["STOP"], pieces, include_in_output=True) == ("abSTOP", "STOP")


def test_text_after_a_stop_is_ignored() -> None:
    scanner = StopStrings(["x"])
    assert (scanner.feed("axb"), scanner.feed("c"), scanner.flush()) == ("a", "", "")


def test_without_stops_nothing_is_held_back() -> None:
    scanner = StopStrings([])
    assert (scanner.feed("any"), scanner.flush()) == ("any", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])


def test_scanners_of_one_automaton_know_nothing_of_each_other() -> None:
    automaton = StopAutomaton(["STOP", "OK"])
    one, two = StopStrings(automaton), StopStrings(automaton, include_in_output=True)
    assert [one.feed("aST"), two.feed("bO"), one.feed("OPx"), two.feed("K")] == ["a", "b", "", "OK"]
    assert (one.matched, two.matched) == ("STOP", "OK")
