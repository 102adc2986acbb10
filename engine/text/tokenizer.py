"""Text to ids and back, from a prepared model's tokenizer.json. Needs neither torch nor transformers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import ModelNotSupported
from engine.prepared import PreparedModel
from engine.text.added_tokens import AddedToken, ControlTokens
from engine.text.pieces import Pieces
from engine.text.plain_encoder import PlainEncoder

Run = str
"""Text between control tokens; it is encoded as a whole."""


class Tokenizer:
    """Safe to share between threads.

    `control` finds the strings that stand for control tokens; only a chat template may write them. All other text is
    encoded with special parsing off.
    """

    def __init__(
        self,
        tokenizer_json: dict[str, Any],
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
    ) -> None:
        """Raises ModelNotSupported, in one sentence, for a tokenizer that cannot be served."""
        model = tokenizer_json.get("model") if isinstance(tokenizer_json, dict) else None
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
            raise ModelNotSupported("tokenizer.json has no model with a vocabulary, so it is no tokenizer file")
        added = [AddedToken.from_json(entry) for entry in tokenizer_json.get("added_tokens") or []]
        self.control = ControlTokens(added)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.special_ids = frozenset(t.id for t in added if t.special)
        """What `skip_special_tokens` leaves out of text."""
        self.control_ids = self.control.ids
        """Special ones and others that users cannot type."""
        self._add_bos = add_bos
        self._pieces = Pieces(tokenizer_json, added)
        self._plain = PlainEncoder(tokenizer_json, added)
        if add_bos and bos_token_id is None:
            raise ModelNotSupported("the model wants a BOS token before text, but names none")

    @classmethod
    def load(cls, model: PreparedModel) -> "Tokenizer":
        """Raises ModelNotSupported if the model's tokenizer.json is missing or cannot be served."""
        try:
            spec = json.loads(model.tokenizer_path.read_bytes())
        except (OSError, ValueError) as e:
            raise ModelNotSupported(f"{model.tokenizer_path} cannot be read: {e}") from None
        manifest = model.manifest
        return cls(
            spec,
            bos_token_id=manifest.bos_token_id,
            eos_token_ids=manifest.eos_token_ids,
            add_bos=manifest.add_bos,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has text; the model's own may be larger, its last rows being padding."""
        return self._pieces.size

    def encode(self, text: str) -> list[int]:
        """Plain text: control strings in it stay text, no BOS. Raises InvalidRequest for half a surrogate pair."""
        return self._plain.encode_first(text)

    def encode_completion(self, text: str) -> list[int]:
        """As `encode`, with one BOS in front where the model wants one."""
        if self._add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *self._plain.encode_after_control(text)]
        return self._plain.encode_first(text)

    def encode_runs(
        self,
        pieces: Iterable[Run | int | Sequence[int]],
        *,
        known_runs: Mapping[str, Sequence[int]] | None = None,
    ) -> list[int]:
        """The ids of a prompt made of runs of text, control ids (an int) and ids that are kept as they are.

        `known_runs` has the ids of runs that stand right after a control token, as `encode_after_control` gives them;
        the caller keeps it (say, one for each assistant).
        """
        ids: list[int] = []
        previous: object = None
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif not isinstance(piece, str):
                ids.extend(piece)
            elif previous is None:
                ids.extend(self._plain.encode_first(piece))
            elif not isinstance(previous, int):
                ids.extend(self._plain.encode_continuation(piece))
            elif known_runs is not None and piece in known_runs:
                ids.extend(known_runs[piece])
            else:
                ids.extend(self._plain.encode_after_control(piece))
            previous = piece
        return ids

    def encode_after_control(self, text: str) -> list[int]:
        """A run of text that follows a control token."""
        return self._plain.encode_after_control(text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD. End ids are left out like special ones."""
        hidden = self.hidden_ids if skip_special_tokens else frozenset[int]()
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id not in hidden:
                parts.append(self.token_bytes(token_id) if parts else self._pieces.at_start(token_id))
        return b"".join(parts).decode(errors="replace")

    @property
    def hidden_ids(self) -> frozenset[int]:
        return self.special_ids.union(self.eos_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Its literal bytes, of a control token those of its name; b"" for an id without text."""
        return self._pieces.literal(token_id)

    def first_token_bytes(self, token_id: int) -> bytes:
        """Of a token that a text begins with: SentencePiece style has no space there."""
        return self._pieces.at_start(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """What it adds to a text; None if it begins or ends within a character."""
        return self._pieces.text(token_id)

    def token_text(self, token_id: int) -> str:
        """For display of one token alone: U+FFFD for pieces of characters."""
        return self.token_bytes(token_id).decode(errors="replace")
