"""The section `[limits]`: its bounds, and that it knows no other settings."""

import pytest
from pydantic import ValidationError

from app.limits import Limits


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_body_bytes", 1),
        ("usage_retention_days", 0),
        ("ping_interval_s", 0),
        ("send_timeout_s", -1),
        ("grace_s", -1),
        ("grace_tokens", 0),
        ("paused_ttl_s", 0),
        ("socket_lifetime_s", 0),
        ("socket_farewell_s", -1),
        ("grace_tokens", 1.5),
        ("grace_seconds", 1),
    ],
)
def test_what_makes_no_sense_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ValidationError, match=setting):
        Limits(**{setting: value})


def test_an_answer_may_be_paused_at_once() -> None:
    assert Limits(grace_s=0, grace_tokens=1).grace_s == 0
