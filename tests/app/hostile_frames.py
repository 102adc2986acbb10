"""What a client might put on a websocket, right or wrong, and what has to become of it: made from a seed."""

import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from app.conversation import MAX_STREAM_ID_CHARS
from app.gateway import MAX_FRAME_BYTES
from app.json_body import MAX_DEPTH

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
PROTOCOL_ERROR, UNSUPPORTED, NO_UTF8, TOO_BIG = 1002, 1003, 1007, 1009
MAX_CONTROL_BYTES = 125
"""Of a control frame's payload, says RFC 6455."""

SCALARS = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 1.5, 1e308, -0.0, "", "x", "auto", "\x00",
           "\u2028", "😀" * 40, "resp_1", "conv_1", "{{a}}", "message", "user", "input_text", "Hi", [], {}]  # fmt: skip
NAMES = ["id", "type", "role", "content", "text", "variables", "version", "format", "a", "effort", "summary"]
TYPES = ["response.create", "response.cancel", "response.resume", "response.steer", "response.append", "session.update",
         "response.created", "error", "", "\x00", None, 1, [], {}]  # fmt: skip
FIELDS = ["model", "input", "instructions", "previous_response_id", "conversation", "prompt", "max_output_tokens", "n",
          "metadata", "store", "background", "include", "top_logprobs", "truncation", "text", "reasoning", "tools",
          "temperature", "top_p", "stop", "seed", "logit_bias", "stop_token_ids", "client_message_id", "user",
          "stream", "stream_id", "response_id", "starting_after", "tool_choice", "chat_template_kwargs", "guided_regex",
          "best_of", "priority", "min_tokens", "ignore_eos", "response_format"]  # fmt: skip
ODD_TEXTS = [
    "", " ", "\ufeff{}", "null", "true", "0", "-", "1e999", "NaN", '"', '"\\', "[]", "[[]]", "{", "}", "{}{}", '{"a"}',
    '{"type": NaN}', '{"type": "response.create", "input": "\\ud800"}', '{"type": "response.create", "input": "\x00"}',
    '{"type":"response.cancel","type":"response.create"}', '{"type": "response.create", "input": ' + "1" * 5000 + "}",
    '{"":' * 40 + "1" + "}" * 40, "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[" * 20_000 + "]" * 20_000,
    "[" * 50_000,
    '{"type":"response.create","input":' + '{"a":' * 5_000 + "1" + "}" * 5_001,
    '{"\\u0000": "\\uffff"}', "\u2028\u0085",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes for the wire, and the close code that has to answer them; None: the connection lives."""

    kind: str
    data: bytes
    num_frames: int = 1
    close: int | None = None
    pongs: tuple[bytes, ...] = ()
    """Payloads that have to come back."""


def frame(opcode: int, payload: bytes, *, fin: bool = True, rsv: int = 0, length: int | None = None,
          mask: bytes | None = b"\x1f\x2e\x3d\x4c") -> bytes:  # fmt: skip
    """As a client sends it; `length` is what it says it has, `mask` None what only a server may send."""
    length = len(payload) if length is None else length
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    mark = 0 if mask is None else 0x80
    if length < 126:
        head += bytes([mark | length])
    elif length < 1 << 16:
        head += bytes([mark | 126]) + length.to_bytes(2)
    else:
        head += bytes([mark | 127]) + length.to_bytes(8)
    if mask is None:
        return head + payload
    size = len(payload)
    stream = int.from_bytes((mask * (size // 4 + 1))[:size])
    return head + mask + (int.from_bytes(payload) ^ stream).to_bytes(size)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass
class HostileClient:
    """Draws what is sent next. What it is given to `remember` it will name in later messages."""

    chance: random.Random
    response_ids: deque[str] = field(default_factory=lambda: deque(["resp_" + "0" * 44], maxlen=64))

    def remember(self, response_id: str) -> None:
        self.response_ids.append(response_id)

    def harmless(self) -> Sent:
        """What the connection has to survive."""
        while (sent := self._draw(HARMLESS)).close is not None:
            pass
        return sent

    def deadly(self) -> Sent:
        """What it has to be closed for."""
        while (sent := self._draw(DEADLY)).close is None:
            pass
        return sent

    def _draw(self, kinds: "dict[Callable[[HostileClient], Sent], int]") -> Sent:
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        return kind(self)

    # ---- what is in them

    def anything(self, depth: int = 0) -> Any:
        if depth < 3 and self.chance.random() < 0.3:
            if self.chance.random() < 0.5:
                return [self.anything(depth + 1) for _ in range(self.chance.randrange(4))]
            return {self.chance.choice(NAMES): self.anything(depth + 1) for _ in range(self.chance.randrange(4))}
        return self.chance.choice(SCALARS)

    def bytes_(self, most: int) -> bytes:
        return self.chance.randbytes(self.chance.randint(0, self.chance.choice([4, 40, most])))

    def text(self, most: int) -> str:
        alphabet = '{}[]",:\\ntruefalse0123456789.eE+- \n\tä€😀\x00'
        return "".join(self.chance.choices(alphabet, k=self.chance.randint(0, self.chance.choice([4, 40, most]))))

    def an_id(self) -> str:
        return self.chance.choice(self.response_ids)

    def stream_id(self) -> dict[str, Any]:
        return {} if self.chance.random() < 0.3 else {"stream_id": f"lane-{self.chance.randrange(5)}"}

    def message(self) -> dict[str, Any]:
        """As the protocol has it, in an order that may be wrong."""
        match self.chance.randrange(5):
            case 0:
                made = {"type": "response.cancel", "response_id": self.an_id()}
            case 1:
                made = {"type": "response.resume", "response_id": self.an_id()}
                if self.chance.random() < 0.7:
                    made["starting_after"] = self.chance.choice([-1, 0, 3, 10**6])
            case _:
                made = {"type": "response.create", "model": "byte-model", "input": self.chance.choice(["Hi", "slow"])}
                if self.chance.random() < 0.3:
                    made["previous_response_id"] = self.an_id()
                if self.chance.random() < 0.4:
                    made["store"] = False
        return made | self.stream_id()

    def raw(self) -> bytes:
        return json.dumps(self.message(), ensure_ascii=False).encode()

    # ---- kinds

    def random_text(self) -> Sent:
        return self._text("random text", self.text(400).encode())

    def odd_text(self) -> Sent:
        return self._text("odd text", self.chance.choice(ODD_TEXTS).encode())

    def truncated(self) -> Sent:
        raw = self.raw()
        return self._text("truncated", raw[: self.chance.randrange(len(raw))])

    def mutated(self) -> Sent:
        raw = bytearray(self.raw())
        for _ in range(self.chance.randint(1, 3)):
            place = self.chance.randrange(len(raw) + 1)
            match self.chance.randrange(3):
                case 0:
                    raw[place:place] = bytes([self.chance.randrange(128)])
                case 1:
                    del raw[place : place + self.chance.randint(1, 9)]
                case 2:
                    raw[place:place] = raw[place : place + 30]
        return self._text("mutated", bytes(raw))

    def wrong_types(self) -> Sent:
        message = self.message()
        for name in self.chance.sample(FIELDS, self.chance.randint(0, 4)):
            message[name] = self.anything()
        if self.chance.random() < 0.2:
            message["type"] = self.chance.choice(TYPES)
        if self.chance.random() < 0.1:
            message["stream_id"] = "x" * (MAX_STREAM_ID_CHARS + self.chance.randrange(2))
        return self._text("wrong types", json.dumps(message).encode())

    def right(self) -> Sent:
        return self._text("right", self.raw())

    def large(self) -> Sent:
        size = self.chance.choice([70_000, MAX_FRAME_BYTES - 100, MAX_FRAME_BYTES])
        head, tail = b'{"type": "response.create", "input": "', b'"}'
        return self._text("large", head + b"x" * (size - len(head) - len(tail)) + tail)

    def ping(self) -> Sent:
        payload = self.chance.randbytes(self.chance.choice([0, 1, 4, MAX_CONTROL_BYTES]))
        return Sent("ping", frame(PING, payload), pongs=(payload,))

    def pong(self) -> Sent:
        return Sent("unasked pong", frame(PONG, self.bytes_(MAX_CONTROL_BYTES)))

    def fragmented(self) -> Sent:
        """One message in pieces, empty ones too, with pings between them."""
        raw = self.chance.choice([self.raw(), self.text(200).encode()])
        cuts = sorted(self.chance.choices(range(len(raw) + 1), k=self.chance.randint(1, 6)))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        data, pongs, num_frames = b"", [], 0
        for i, piece in enumerate(pieces):
            data += frame(TEXT if i == 0 else CONTINUATION, piece, fin=i == len(pieces) - 1)
            num_frames += 1
            if i < len(pieces) - 1 and self.chance.random() < 0.3:
                pongs.append(self.chance.randbytes(4))
                data += frame(PING, pongs[-1])
                num_frames += 1
        return Sent("fragmented", data, num_frames, pongs=tuple(pongs))

    # what ends the connection

    def random_bytes(self) -> Sent:
        return self._text("random bytes", self.bytes_(2000))

    def cut_character(self) -> Sent:
        raw = '{"type": "response.create", "input": "😀"}'.encode()
        return self._text("cut character", raw[: raw.index("😀".encode()) + self.chance.randint(1, 3)])

    def binary(self) -> Sent:
        return Sent("binary", frame(BINARY, self.chance.choice([self.raw(), self.bytes_(400)])), close=UNSUPPORTED)

    def too_large(self) -> Sent:
        size = self.chance.choice([MAX_FRAME_BYTES + 1, 300_000, 2**20])
        return Sent("too large", frame(TEXT, b"x" * size), close=TOO_BIG)

    def too_large_in_pieces(self) -> Sent:
        piece = b"x" * (MAX_FRAME_BYTES // 4)
        pieces = [frame(TEXT, piece, fin=False), *[frame(CONTINUATION, piece, fin=False)] * 4]
        return Sent("too large in pieces", b"".join(pieces), len(pieces), close=TOO_BIG)

    def vast_length(self) -> Sent:
        length = self.chance.choice([2**32, 2**62, 2**63 - 1])
        return Sent("vast length", frame(TEXT, b"x" * 100, length=length), close=TOO_BIG)

    def misframed(self) -> Sent:
        """Against RFC 6455."""
        wrong = self.chance.choice([
            frame(TEXT, b"{}", mask=None),
            frame(TEXT, b"{}", rsv=self.chance.randint(1, 7)),
            frame(self.chance.choice([3, 4, 7, 11, 15]), b"{}"),
            frame(CONTINUATION, b"{}"),
            frame(PING, b"x", fin=False),
            frame(PING, b"x" * (MAX_CONTROL_BYTES + 1)),
            frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"),
            frame(CLOSE, b"x"),
            frame(CLOSE, self.chance.choice([0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65535]).to_bytes(2)),
        ])  # fmt: skip
        return Sent("misframed", wrong, close=PROTOCOL_ERROR)

    def close(self) -> Sent:
        code = self.chance.choice([1000, 1001, 1003, 1007, 1011, 3000, 4999])
        reason = self.text(20).encode()[: MAX_CONTROL_BYTES - 2]
        if not is_utf8(reason):
            return self.close()
        return Sent("close", frame(CLOSE, code.to_bytes(2) + reason), close=code)

    def _text(self, kind: str, payload: bytes) -> Sent:
        return Sent(kind, frame(TEXT, payload), close=None if is_utf8(payload) else NO_UTF8)


HARMLESS: dict[Callable[[HostileClient], Sent], int] = {
    HostileClient.random_text: 12, HostileClient.odd_text: 12, HostileClient.truncated: 14, HostileClient.mutated: 14,
    HostileClient.wrong_types: 20, HostileClient.right: 8, HostileClient.ping: 8, HostileClient.pong: 5,
    HostileClient.fragmented: 6, HostileClient.large: 1,
}  # fmt: skip
DEADLY: dict[Callable[[HostileClient], Sent], int] = {
    HostileClient.random_bytes: 5, HostileClient.cut_character: 1, HostileClient.binary: 4, HostileClient.misframed: 8,
    HostileClient.too_large: 1, HostileClient.too_large_in_pieces: 1, HostileClient.vast_length: 1,
    HostileClient.close: 4,
}  # fmt: skip


def in_pieces(chance: random.Random, data: bytes) -> Iterator[bytes]:
    """As a network might deliver it."""
    while data:
        size = chance.choice([1, 2, 7, 100, 4096, len(data)])
        yield data[:size]
        data = data[size:]
