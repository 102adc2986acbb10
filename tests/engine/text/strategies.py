"""Texts that users type, for hypothesis."""

from hypothesis import strategies as st

from engine.text.added_tokens import ControlTokens

WORDS = [
    "Hello",
    " world",
    "1234",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " ",
    "é",
    "e\u0301",
    "你好",
    "😀",
    "👩‍👩‍👧",
    "<",
    "|",
    ">",
    "'s",
    "\u3000",
]

characters = st.characters(exclude_categories=["Cs"])
plain_texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(characters, max_size=5)), max_size=8).map("".join)


def hostile_texts(control: ControlTokens) -> st.SearchStrategy[str]:
    """Control strings, parts of them and ordinary text in any order."""
    names = sorted(control.by_content)
    parts = sorted({n[:i] for n in names for i in range(1, len(n))} | {n[i:] for n in names for i in range(1, len(n))})
    piece = st.one_of(
        st.sampled_from(names), st.sampled_from(parts), st.sampled_from(WORDS), st.text(characters, max_size=4)
    )
    return st.lists(piece, max_size=8).map("".join)
