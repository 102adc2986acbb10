"""What a client is told when something fails: OpenAI's error envelope.

ApiError
├── BadRequest         400 invalid_request_error
├── Unauthorized       401 authentication_error
├── Forbidden          403 permission_error
├── NotFound           404 not_found_error
├── MethodNotAllowed   405 invalid_request_error
├── Conflict           409 invalid_request_error
├── PayloadTooLarge    413 invalid_request_error
├── Unprocessable      422 invalid_request_error
├── RateLimited        429 rate_limit_error
├── GenerationFailed   500 server_error       the engine gave up this one answer
└── EngineUnavailable  503 server_error       no engine can answer now
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import orjson

from engine.errors import RequestError
from engine.protocol import ErrorInfo

REFUSAL_CODES = frozenset({"invalid_request", "context_length_exceeded", "unsupported_parameter", "template_error"})
"""Codes of the engine's errors that are the request's fault; every other one is the server's."""


class ApiError(Exception):
    """An answer that is an error. The class gives status and type; `code` and `param` may be None, as with OpenAI."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.default_code
        self.param = param
        self.headers: dict[str, str] = dict(headers or {})

    def error(self) -> dict[str, str | None]:
        """The inner object: message, type, param, code."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def envelope(self) -> dict[str, Any]:
        return {"error": self.error()}

    def envelope_bytes(self) -> bytes:
        return orjson.dumps(self.envelope())


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"
    default_code = None


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message, **more)
        self.headers.setdefault("WWW-Authenticate", "Bearer")


class Forbidden(ApiError):
    status = 403
    type = "permission_error"
    default_code = None


class NotFound(ApiError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    default_code = "method_not_allowed"


class Conflict(ApiError):
    status = 409
    type = "invalid_request_error"
    default_code = None


class PayloadTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class Unprocessable(ApiError):
    status = 422
    type = "invalid_request_error"
    default_code = None


class RateLimited(ApiError):
    """`retry_after_s` becomes the Retry-After header."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int, **more: Any) -> None:
        super().__init__(message, **more)
        self.headers.setdefault("Retry-After", str(retry_after_s))


class GenerationFailed(ApiError):
    status = 500


class EngineUnavailable(ApiError):
    status = 503
    default_code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 2, **more: Any) -> None:
        super().__init__(message, **more)
        self.headers.setdefault("Retry-After", str(retry_after_s))


class ShuttingDown(EngineUnavailable):
    """Another gateway, or this one when it is back, may serve it."""

    default_code = "shutting_down"

    def __init__(self, message: str = "The server is shutting down.") -> None:
        super().__init__(message, retry_after_s=1)


def from_status(status: int, message: str) -> ApiError:
    """The error for a status that the framework chose: an unknown route, a wrong method."""
    for known in (BadRequest, NotFound, MethodNotAllowed):
        if known.status == status:
            return known(message)
    return BadRequest(message) if status < 500 else ApiError(message)


def from_request_error(error: RequestError) -> ApiError:
    """A refusal by the engine or by the text layer, as its client reads it."""
    return from_error_info(ErrorInfo(error.message, error.code, error.param))


def from_error_info(error: ErrorInfo) -> ApiError:
    """An error that came from the engine with an output."""
    if error.code in REFUSAL_CODES:
        code = None if error.code == "invalid_request" else error.code
        return BadRequest(error.message, code=code, param=error.param)
    if error.code == "overloaded":
        return EngineUnavailable(error.message, code=error.code)
    return GenerationFailed(error.message, code=error.code, param=error.param)
