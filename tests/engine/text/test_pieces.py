import pytest

from engine.errors import ModelNotSupported
from engine.text.added_tokens import AddedToken
from engine.text.pieces import Pieces
from tests.byte_model import _byte_characters


def spec(vocab: object, *decoders: dict[str, object]) -> dict[str, object]:
    decoder = decoders[0] if len(decoders) == 1 else {"type": "Sequence", "decoders": list(decoders)}
    return {"model": {"vocab": vocab}, "decoder": decoder}


def test_byte_level_characters_are_bytes() -> None:
    pieces = Pieces(spec({c: b for b, c in _byte_characters().items()}, {"type": "ByteLevel"}), [])
    assert [pieces.literal(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert pieces.size == 256


def test_sentencepiece_style() -> None:
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    vocab = {"▁Hi": 0, "<0xC3>": 1, "é": 2, "▁▁x": 3, "<0x20>": 4}
    pieces = Pieces(spec(vocab, replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip), [])
    assert [pieces.literal(i) for i in range(5)] == [b" Hi", b"\xc3", "é".encode(), b"  x", b" "]
    assert [pieces.at_start(i) for i in range(5)] == [b"Hi", b"\xc3", "é".encode(), b" x", b""]


def test_metaspace_and_a_unigram_vocabulary() -> None:
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    pieces = Pieces(spec([["▁Hi", -1.0], ["<0xC3>", -2.0]], metaspace), [])
    assert [pieces.literal(0), pieces.at_start(0), pieces.literal(1)] == [b" Hi", b"Hi", b"<0xC3>"]
    pieces = Pieces(spec([["▁Hi", -1.0]], metaspace | {"prepend_scheme": "never"}), [])
    assert pieces.at_start(0) == b" Hi"


def test_added_tokens_are_their_own_text() -> None:
    added = [AddedToken(5, "<｜end▁of▁text｜>", special=True)]
    pieces = Pieces(spec({"a": 0}, {"type": "ByteLevel"}), added)
    assert pieces.literal(5) == "<｜end▁of▁text｜>".encode()
    assert [pieces.literal(i) for i in (-1, 3, 6)] == [b"", b"", b""]
    assert pieces.size == 6


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"}]
)
def test_text_that_depends_on_neighbouring_tokens_is_refused(decoder: dict[str, object] | None) -> None:
    with pytest.raises(ModelNotSupported, match=r"decode"):
        Pieces({"model": {"vocab": {}}, "decoder": decoder}, [])
