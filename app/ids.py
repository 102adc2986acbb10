"""Ids of responses and items. They cannot be guessed, and still an id is never a credential: see app/sessions.py.

A response id is `resp_`, 22 base62 characters of its root (the first turn of the conversation) and 22 of its own node,
so that the keys of one conversation carry one hash tag and lie in one slot of a Redis cluster.
"""

import re
import secrets
import string
from typing import NamedTuple

_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
_PART_CHARS = 22
"""62**22 is just over 2**130."""
_RESPONSE = re.compile(rf"resp_([0-9A-Za-z]{{{_PART_CHARS}}})([0-9A-Za-z]{{{_PART_CHARS}}})", re.ASCII)

_CONVERSATION = re.compile(rf"conv_([0-9A-Za-z]{{{_PART_CHARS}}})", re.ASCII)


class ResponseId(NamedTuple):
    root: str
    node: str

    def __str__(self) -> str:
        return f"resp_{self.root}{self.node}"

    def child(self) -> "ResponseId":
        """A new id in the same conversation."""
        return ResponseId(self.root, _random_part())

    def relative(self, node: str) -> "ResponseId":
        """The id of another node of the same conversation."""
        return ResponseId(self.root, node)


def new_response_id() -> ResponseId:
    """The id of a conversation's first response."""
    return ResponseId(_random_part(), _random_part())


class ConversationId(NamedTuple):
    """Its responses have its root: all keys of a conversation carry one hash tag."""

    root: str

    def __str__(self) -> str:
        return f"conv_{self.root}"

    def new_response(self) -> ResponseId:
        return ResponseId(self.root, _random_part())


def new_conversation_id() -> ConversationId:
    return ConversationId(_random_part())


def try_parse_conversation_id(text: str) -> ConversationId | None:
    """None when `text` is no id that this service could have given out."""
    match = _CONVERSATION.fullmatch(text)
    return ConversationId(match[1]) if match else None


def try_parse_response_id(text: str) -> ResponseId | None:
    """None when `text` is no id that this service could have given out."""
    match = _RESPONSE.fullmatch(text)
    return ResponseId(match[1], match[2]) if match else None


def new_id(prefix: str) -> str:
    """`prefix` and 22 random characters, such as `chatcmpl-...`."""
    return prefix + _random_part()


def new_message_id() -> str:
    return new_id("msg_")


def _random_part() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_PART_CHARS))
