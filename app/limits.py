"""How much one client may send, hold and wait for: the section `[limits]` of the operator's file."""

from pydantic import BaseModel, ConfigDict, Field

from app.json_body import MAX_BODY_BYTES


class Section(BaseModel):
    """Of the operator's file: what it does not know is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Limits(Section):
    max_body_bytes: int = Field(default=MAX_BODY_BYTES, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    """Of one request: prompts times n."""
    max_messages: int = Field(default=4096, ge=1)
    usage_retention_days: int = Field(default=90, ge=1, le=3650)
    """The usage ledger is kept for so long."""
    ping_interval_s: float = Field(default=10.0, gt=0)
    """A comment is sent on a silent event stream this often."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """A client that takes nothing for so long is dropped."""
    socket_lifetime_s: float = Field(default=3600.0, gt=0)
    """A websocket is closed when it is so old."""
    socket_farewell_s: float = Field(default=60.0, ge=0)
    """So long before that it takes nothing new, and its client is asked for a new connection."""
    grace_s: float = Field(default=30.0, ge=0)
    """A stored answer that nobody reads goes on for so long,"""
    grace_tokens: int = Field(default=2048, ge=1)
    """and for no more tokens than these; then it is paused. One that runs in the background is not."""
    paused_ttl_s: float = Field(default=600.0, gt=0)
    """A paused answer waits for a reader for so long, then it ends as incomplete."""
