"""What is said to whoever asks for a response that is not there, or not any more."""

from app.errors import NotFound
from app.ids import ResponseId, try_parse_response_id


def unknown_response(response_id: str) -> NotFound:
    """The one answer for ids that do not exist and for those of other tenants."""
    return NotFound(f"Response with id '{response_id}' not found.", code="response_not_found")


def events_not_held(response_id: str) -> NotFound:
    """They have expired, or the response was deleted."""
    return NotFound(
        f"The events of response '{response_id}' are not held any more; get it without 'stream'.",
        code="response_not_found",
    )


def parse_known(response_id: str) -> ResponseId:
    """Raises NotFound, as for an id that nobody has."""
    parsed = try_parse_response_id(response_id)
    if parsed is None:
        raise unknown_response(response_id)
    return parsed
