import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from tests.byte_model import _byte_characters
from tests.engine.text.small_tokenizers import FAMILIES, family
from tests.engine.text.strategies import characters, plain_texts

BYTES = _byte_characters()


def tokenizer_of(pieces: list[bytes], *, specials: tuple[str, ...] = (), end: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level: the ids count through `pieces`, then through the special and end tokens."""
    names = [*specials, *end]
    added = [
        {"id": len(pieces) + i, "content": name, "special": True, "normalized": False} for i, name in enumerate(names)
    ]
    spec = {
        "version": "1.0",
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "decoder": {"type": "ByteLevel"},
    }
    vocab = spec["model"]["vocab"]
    for i, piece in enumerate(pieces):
        vocab["".join(BYTES[b] for b in piece)] = i
    return Tokenizer(spec, eos_token_ids=range(len(pieces) + len(specials), len(pieces) + len(names)))


def ids_of(pieces: list[bytes]) -> tuple[list[bytes], list[int]]:
    """Distinct pieces, and the pieces as ids."""
    distinct = list(dict.fromkeys(pieces))
    return distinct, [distinct.index(piece) for piece in pieces]


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    """The delta of each id, then what the end brings."""
    return [*(detokenizer.append([i]) for i in ids), detokenizer.finish()]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({c % len(data) for c in cuts} | {0, len(data)}) if data else []
    return [data[i:j] for i, j in itertools.pairwise(ends)]


# ---- characters split over tokens


@given(st.text(characters, max_size=20), st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 4))
def test_b13_any_text_cut_at_any_bytes_comes_out_whole(text: str, cuts: list[int], step: int) -> None:
    pieces, ids = ids_of(cut(text.encode(), cuts))
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces))
    deltas = [detokenizer.append(ids[i : i + step]) for i in range(0, len(ids), step)]
    # nothing is missing at the end of a valid text
    assert "".join(deltas) == text
    assert detokenizer.finish() == ""
    assert detokenizer.text == text
    assert detokenizer.num_settled_tokens == len(ids)


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=40))
def test_b13_bytes_that_are_no_text_come_out_as_the_whole_decode(data: bytes, cuts: list[int]) -> None:
    pieces, ids = ids_of(cut(data, cuts))
    tokenizer = tokenizer_of(pieces)
    deltas = stream(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(deltas) == tokenizer.decode(ids) == data.decode(errors="replace")


def test_b13_an_emoji_of_four_tokens() -> None:
    pieces, ids = ids_of([bytes([b]) for b in "a😀b".encode()])
    assert stream(IncrementalDetokenizer(tokenizer_of(pieces)), ids) == ["a", "", "", "", "😀", "b", ""]


def test_b13_joined_emoji() -> None:
    text = "👩‍👩‍👧"
    pieces, ids = ids_of(cut(text.encode(), [2, 5, 6, 9, 12]))
    assert "".join(stream(IncrementalDetokenizer(tokenizer_of(pieces)), ids)) == text


def test_b13_an_end_within_a_character_is_one_replacement_character_at_the_end() -> None:
    pieces, ids = ids_of([b"a", b"\xf0", b"\x9f\x98"])
    tokenizer = tokenizer_of(pieces, end=("<end>",))
    end = tokenizer.eos_token_ids[0]
    assert stream(IncrementalDetokenizer(tokenizer), ids) == ["a", "", "", "\ufffd"]
    assert stream(IncrementalDetokenizer(tokenizer), [*ids, end]) == ["a", "", "", "", "\ufffd"]


def test_b13_a_byte_fallback_token_then_text_within_a_character() -> None:
    tokenizer = family("mistral").tokenizer
    all_bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    ids = [all_bytes.index(data) for data in (b"a", b"\xf0", b"\x9f", b"b")]
    assert stream(IncrementalDetokenizer(tokenizer), ids) == ["a", "", "", "\ufffdb", ""]


@pytest.mark.parametrize("name", FAMILIES)
@settings(deadline=None, max_examples=40)
@given(text=plain_texts, step=st.integers(1, 5))
def test_b13_deltas_put_together_are_the_whole_decode(name: str, text: str, step: int) -> None:
    tokenizer = family(name).tokenizer
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.append(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(deltas) == tokenizer.decode(ids)


def test_a_prompt_of_ids_may_end_within_a_character() -> None:
    pieces, ids = ids_of([bytes([b]) for b in "é!".encode()])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), prompt_suffix_ids=ids[:1])
    assert stream(detokenizer, ids[1:]) == ["é", "!", ""]


# ---- spaces


@pytest.mark.parametrize("name", ["smollm2", "mistral", "llama2", "gemma"])
@pytest.mark.parametrize(
    "text", ["Hello world", "def f():\n    if x:\n        return 1", "x" * 300, "trailing space ", "a  b   c"]
)
def test_b14_spaces_are_neither_lost_nor_doubled_and_no_token_waits(name: str, text: str) -> None:
    tokenizer = family(name).tokenizer
    ids = tokenizer.encode(text)
    *deltas, rest = stream(IncrementalDetokenizer(tokenizer), ids)
    assert ("".join(deltas), rest) == (text, "")
    # the first of SentencePiece style may be the bare space that stands before words
    assert all(deltas[1:])


@pytest.mark.parametrize("name", ["mistral", "llama2"])
def test_b14_a_word_that_continues_a_prompt_keeps_its_space(name: str) -> None:
    tokenizer = family(name).tokenizer
    prompt, both = tokenizer.encode("Hello"), tokenizer.encode("Hello world")
    assert both[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_suffix_ids=prompt)
    assert "".join(stream(detokenizer, both[len(prompt) :])) == " world"
    assert "".join(stream(IncrementalDetokenizer(tokenizer), both[len(prompt) :])) == "world"


# ---- stop strings


def test_b15_a_stop_that_spans_tokens() -> None:
    pieces, ids = ids_of([b"ab", b"cS", b"TO", b"Pde"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["STOP"])
    assert stream(detokenizer, ids) == ["ab", "c", "", "", ""]
    assert (detokenizer.stop_string, detokenizer.text) == ("STOP", "abc")
    # "cS" is not wholly in the text
    assert detokenizer.num_settled_tokens == 1


def test_b15_ids_after_a_stop_are_ignored() -> None:
    pieces, ids = ids_of([b"ab", b"X", b"cd"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["X"])
    assert detokenizer.append(ids) == "ab"
    assert (detokenizer.append(ids), detokenizer.finish(), detokenizer.text) == ("", "", "ab")
    assert detokenizer.num_settled_tokens == 1


def test_b15_a_stop_that_is_shown() -> None:
    pieces, ids = ids_of([b"ab", b"ST", b"OPcd"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["STOP"], include_stop_str_in_output=True)
    assert stream(detokenizer, ids) == ["ab", "", "STOP", ""]
    assert detokenizer.num_settled_tokens == 2


def test_b15_a_stop_with_characters_that_are_split_over_tokens() -> None:
    pieces, ids = ids_of([b"a", *(bytes([b]) for b in "😀é".encode()), b"b"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["😀é"])
    assert "".join(stream(detokenizer, ids)) == "a"
    assert (detokenizer.stop_string, detokenizer.num_settled_tokens) == ("😀é", 1)


@given(
    st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3),
    st.text("abé😀", max_size=20),
    st.lists(st.integers(0, 1000), max_size=20),
)
def test_b16_streamed_text_is_the_text_of_all_ids_at_once(stops: list[str], text: str, cuts: list[int]) -> None:
    pieces, ids = ids_of(cut(text.encode(), cuts))
    tokenizer = tokenizer_of(pieces, end=("<end>",))
    streamed, whole = (IncrementalDetokenizer(tokenizer, stop=stops) for _ in range(2))
    ids.append(tokenizer.eos_token_ids[0])
    assert "".join(stream(streamed, ids)) == whole.append(ids) + whole.finish()
    assert (streamed.stop_string, streamed.text) == (whole.stop_string, whole.text)
    assert streamed.num_settled_tokens == whole.num_settled_tokens


@pytest.mark.parametrize("ends_with_end_token", [True, False])
def test_b16_what_could_have_become_a_stop_is_released_at_the_end(ends_with_end_token: bool) -> None:
    pieces, ids = ids_of([b"What", b"?"])
    tokenizer = tokenizer_of(pieces, end=("<end>",))
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["?!"])
    ids += tokenizer.eos_token_ids if ends_with_end_token else []
    deltas = stream(detokenizer, ids)
    assert (deltas[:2], deltas[-1], detokenizer.stop_string) == (["What", ""], "?", None)
    assert detokenizer.num_settled_tokens == 2
    assert detokenizer.finish() == ""


def test_b16_a_replacement_character_at_the_end_can_complete_a_stop() -> None:
    pieces, ids = ids_of([b"a", b"b", b"\xf0"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["b\ufffd"])
    assert stream(detokenizer, ids) == ["a", "", "", ""]
    assert (detokenizer.text, detokenizer.stop_string) == ("a", "b\ufffd")


# ---- end tokens


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("end", [0, 1])
def test_b45_no_end_token_shows_at_the_end(skip_special_tokens: bool, end: int) -> None:
    tokenizer = tokenizer_of([b"Hi"], end=("<|im_end|>", "<|endoftext|>"))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    assert stream(detokenizer, [0, tokenizer.eos_token_ids[end]]) == ["Hi", "", ""]
    assert detokenizer.num_settled_tokens == 1


def test_b45_an_end_token_that_is_no_special_token_does_not_show() -> None:
    tokenizer = tokenizer_of([b"Hi", b"###"])
    tokenizer.eos_token_ids = (1,)
    assert stream(IncrementalDetokenizer(tokenizer), [0, 1]) == ["Hi", "", ""]


def test_b45_a_stop_token_of_the_request_does_not_show_unless_asked() -> None:
    tokenizer = tokenizer_of([b"Hi", b"\n"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.append([0, 1], stop_token_id=1) == "Hi"
    assert detokenizer.num_settled_tokens == 1
    detokenizer = IncrementalDetokenizer(tokenizer, include_stop_str_in_output=True)
    assert detokenizer.append([0, 1], stop_token_id=1) == "Hi\n"


def test_b45_end_tokens_that_do_not_end_show_only_when_special_tokens_do() -> None:
    tokenizer = tokenizer_of([b"Hi"], end=("<end>",))
    end = tokenizer.eos_token_ids[0]
    assert stream(IncrementalDetokenizer(tokenizer), [0, end, 0, end]) == ["Hi", "", "Hi", "", ""]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert stream(detokenizer, [0, end, 0, end]) == ["Hi", "", "<end>Hi", "", ""]
    assert detokenizer.num_settled_tokens == 3


def test_special_tokens_show_only_if_asked() -> None:
    tokenizer = tokenizer_of([b"a", b"b"], specials=("<tool>",))
    assert stream(IncrementalDetokenizer(tokenizer), [0, 2, 1]) == ["a", "", "b", ""]
    assert stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), [0, 2, 1]) == ["a", "<tool>", "b", ""]


def test_added_tokens_that_are_not_special_show() -> None:
    tokenizer = family("qwen3").tokenizer
    think = family("qwen3").ids["<think>"]
    assert stream(IncrementalDetokenizer(tokenizer), [think]) == ["<think>", ""]


# ---- settled tokens


def test_tokens_are_settled_when_their_text_is_wholly_out() -> None:
    pieces, ids = ids_of([b"a", b"\xc3", b"\xa9b", b"c", b"d\xc3"])
    detokenizer = IncrementalDetokenizer(tokenizer_of(pieces), stop=["bcx"])
    settled = []
    for token_id in ids:
        detokenizer.append([token_id])
        settled.append((detokenizer.text, detokenizer.num_settled_tokens))
    # "é" is out while its second token is held back, as its "b" could begin the stop string
    assert settled == [("a", 1), ("a", 1), ("aé", 2), ("aé", 2), ("aébcd", 4)]
    assert (detokenizer.finish(), detokenizer.num_settled_tokens) == ("\ufffd", 5)


def test_the_work_for_a_token_does_not_grow_with_the_answer() -> None:
    asked = []

    class Counting(Tokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().token_bytes(token_id)

    tokenizer = Counting(family("smollm2").spec)
    ids = tokenizer.encode("one circuit that many calls share " * 50)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["sharks", "calls shared"])
    for token_id in ids:
        detokenizer.append([token_id])
    assert asked == ids[1:]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = tokenizer_of([b"a"])
    assert stream(IncrementalDetokenizer(tokenizer), [0, 7, 10**9, 0]) == ["a", "", "", "a", ""]
