import re

from hypothesis import given
from hypothesis import strategies as st

from engine.text.added_tokens import AddedToken, ControlTokens, alternation


def tokens(*contents: str, **kwargs: bool) -> ControlTokens:
    return ControlTokens(AddedToken(i, content, special=True, **kwargs) for i, content in enumerate(contents))


def test_text_is_split_at_control_strings() -> None:
    assert list(tokens("<a>", "<b>").split("x<a><b> y<a")) == ["x", 0, 1, " y<a"]


def test_the_longest_of_those_that_start_at_one_place_is_taken() -> None:
    assert list(tokens("<a", "<a>", "<a>>>").split("<a>><a>>>")) == [1, ">", 2]


def test_tokens_that_strip_swallow_white_space_but_no_separator_characters() -> None:
    assert list(tokens("<a>", rstrip=True).split("x <a> \n\u3000y")) == ["x ", 0, "y"]
    assert list(tokens("<a>", lstrip=True).split("x \n<a> y")) == ["x", 0, " y"]
    assert list(tokens("<a>", rstrip=True).split("<a>\x1fy")) == [0, "\x1fy"]


def test_single_words_are_found_only_between_words() -> None:
    assert list(tokens("end", single_word=True).split("end ending _end end.")) == [0, " ending _end ", 0, "."]


def test_white_space_that_is_not_special_is_ordinary_text() -> None:
    control = ControlTokens([AddedToken(0, "\n\n", special=False), AddedToken(1, "▁▁", special=False)])
    assert list(control.split("a\n\n▁▁b")) == ["a\n\n▁▁b"]
    assert ControlTokens([AddedToken(0, "<think>", special=False)]).ids == {0}


def test_what_could_become_a_control_string_with_its_neighbours() -> None:
    control = tokens("<think>")
    joins = ["<", "a <th", ">b", "nk> b", "thin", "hink"]
    assert [text for text in [*joins, "a", "a < b", "thinking", "a>"] if control.can_join(text)] == joins


@given(st.sets(st.text("ab<>", min_size=1, max_size=5), min_size=1), st.text("ab<>", max_size=30))
def test_the_trie_matches_as_a_plain_alternation_sorted_by_length(strings: set[str], text: str) -> None:
    plain = "|".join(re.escape(s) for s in sorted(strings, key=len, reverse=True))
    assert re.findall(alternation(strings), text) == re.findall(plain, text)
