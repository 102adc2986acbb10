"""Query parameters that several routes have, and OpenAI's pages of items."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from app.errors import BadRequest
from app.events import Item

_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
MAX_PAGE = 100
DEFAULT_PAGE = 20


def read_page(request: Request, items: Sequence[Item]) -> dict[str, Any]:
    """The page of `items` that `limit`, `order` and `after` ask for. Raises BadRequest."""
    limit = read_integer(request, "limit", default=DEFAULT_PAGE, lowest=1, highest=MAX_PAGE)
    return page_of(items, limit, request.query_params.get("order", "desc"), request.query_params.get("after"))


def page_of(items: Sequence[Item], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """OpenAI's list of items, newest first unless `order` is asc. Raises BadRequest for an unknown order or `after`."""
    if order not in ("asc", "desc"):
        raise _bad_query("order", "'asc' or 'desc'", order)
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise _bad_query("after", "the id of one of the items", after)
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].id if page else "",
        "last_id": page[-1].id if page else "",
        "has_more": len(ordered) > limit,
    }


def read_integer(request: Request, name: str, *, default: int, lowest: int, highest: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not _INTEGER.fullmatch(text) or not lowest <= int(text) <= highest:
        raise _bad_query(name, f"an integer from {lowest} to {highest}", text)
    return int(text)


def read_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise _bad_query(name, "true or false", text)
    return text in ("true", "1")


def _bad_query(name: str, wanted: str, got: str) -> BadRequest:
    return BadRequest(f"'{name}' must be {wanted}, got {got[:80]!r}.", code="invalid_value", param=name)
