import json

from hypothesis import given
from hypothesis import strategies as st

from engine.text.added_tokens import AddedToken, ControlTokens
from engine.text.guarded_text import Guard

CONTROL = ControlTokens(AddedToken(i, content, special=True) for i, content in enumerate(["<a>", "<a", "a>b", "x"]))
texts = st.text("<a>bx \n\x1f\u3000", max_size=20)


@given(texts, texts, texts)
def test_no_control_string_is_left_and_all_comes_back(before: str, content: str, after: str) -> None:
    guard = Guard(CONTROL)
    guarded = guard.protect(content)
    assert not CONTROL.pattern.search(guarded)
    # whatever a template puts around it, a control string lies wholly before or wholly after
    text = f"{before}{guarded}{after}"
    ends = {len(before), len(before) + len(guarded)}
    spans = [match.span() for match in CONTROL.pattern.finditer(text)] if content.strip() else []
    assert not any(start < end < stop for start, stop in spans for end in ends)
    assert guard.restore(guarded) == content


@given(texts)
def test_white_space_stays_at_the_ends(content: str) -> None:
    guard = Guard(CONTROL)
    assert guard.restore(guard.protect(content).strip()) == content.strip()


def test_ordinary_text_is_left_alone() -> None:
    guard = Guard(CONTROL)
    assert guard.protect(" It is 1 < 2. ") == " It is 1 < 2. "


def test_strings_within_values_are_guarded() -> None:
    guard = Guard(CONTROL)
    value = {"k<a>": ["<a>", 1, None, True, {"n": "<a>"}]}
    guarded = json.dumps(guard.protect_all(value), ensure_ascii=False)
    assert "<a>" not in guarded
    assert guard.restore(guarded) == json.dumps(value)


def test_kept_answers_are_found_in_order_and_repeated() -> None:
    guard = Guard(CONTROL)
    text = f"one {guard.kept(3)}{guard.kept(0)} two {guard.kept(3)}"
    assert guard.find_kept(text) == [3, 0, 3]
    assert list(guard.split_kept(text)) == ["one ", 3, "", 0, " two ", 3, ""]


def test_stand_ins_of_another_guard_are_text() -> None:
    first, second = Guard(CONTROL), Guard(CONTROL)
    second.protect("<a>")
    foreign = first.protect("<a>")
    assert second.restore(foreign) == foreign
    assert second.find_kept(first.kept(0)) == []
