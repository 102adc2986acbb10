"""The error envelope."""

import json

import pytest

from app import errors
from engine.errors import InvalidRequest, RequestTooLarge
from engine.protocol import ErrorInfo


def test_the_envelope_is_openais() -> None:
    error = errors.BadRequest("no", code="c", param="n")
    assert json.loads(error.envelope_bytes()) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert errors.BadRequest("no").error()["code"] is None


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.Unauthorized("x"), 401, "authentication_error"),
        (errors.Forbidden("x"), 403, "permission_error"),
        (errors.NotFound("x"), 404, "not_found_error"),
        (errors.Conflict("x"), 409, "invalid_request_error"),
        (errors.PayloadTooLarge("x"), 413, "invalid_request_error"),
        (errors.Unprocessable("x"), 422, "invalid_request_error"),
        (errors.RateLimited("x", retry_after_s=3), 429, "rate_limit_error"),
        (errors.GenerationFailed("x"), 500, "server_error"),
        (errors.EngineUnavailable("x"), 503, "server_error"),
    ],
)
def test_status_and_type(error: errors.ApiError, status: int, kind: str) -> None:
    assert (error.status, error.type) == (status, kind)


def test_retry_after() -> None:
    assert errors.RateLimited("x", retry_after_s=3).headers["Retry-After"] == "3"
    assert int(errors.EngineUnavailable("x").headers["Retry-After"]) > 0


def test_errors_of_the_engine() -> None:
    assert errors.from_request_error(InvalidRequest("bad", param="n")).error() == {
        "message": "bad",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }
    too_large = errors.from_request_error(RequestTooLarge("big", needed_tokens=2, limit_tokens=1))
    assert (too_large.status, too_large.code) == (400, "context_length_exceeded")
    failed = errors.from_error_info(ErrorInfo("the step failed", "internal_error"))
    assert (failed.status, failed.code) == (500, "internal_error")


def test_statuses_of_the_framework() -> None:
    assert [errors.from_status(s, "x").status for s in (400, 404, 405, 418, 500)] == [400, 404, 405, 400, 500]
