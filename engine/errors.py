"""What can go wrong in the engine.

EngineError
├── RequestError          this request failed; the engine and its other requests are well
│   ├── InvalidRequest    it should not have been sent: names the parameter and the reason
│   ├── RequestTooLarge   it can never fit: carries what it needs and what there is
│   └── Overloaded        too many wait already: another time it may be served
├── EngineDeadError       the engine has gone; every request that ran on it has ended
├── ModelNotSupported     this model cannot be served, in one sentence
└── NotEnoughMemory       carries the bytes needed and the bytes there are
"""


class EngineError(Exception):
    """Base of all errors of the engine."""


class RequestError(EngineError):
    """One request failed. `code` is a machine-readable word, `param` the field at fault or None."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidRequest(RequestError):
    """The request has a value that the engine refuses."""


class RequestTooLarge(RequestError):
    """The request can never fit, however long it waits."""

    def __init__(self, message: str, *, needed_tokens: int, limit_tokens: int, param: str | None = None) -> None:
        super().__init__(message, code="context_length_exceeded", param=param)
        self.needed_tokens = needed_tokens
        self.limit_tokens = limit_tokens


class Overloaded(RequestError):
    """As many requests of this tenant wait as may wait."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(f"{max_waiting} requests wait already: try again later", code="overloaded")
        self.max_waiting = max_waiting


class EngineDeadError(EngineError):
    """The engine process has gone (or was never there).

    `is_crash`: it may have broken by what ran on it; else it was told to end, or only its connection was given up.
    """

    def __init__(self, message: str, *, is_crash: bool = False) -> None:
        super().__init__(message)
        self.is_crash = is_crash


class ModelNotSupported(EngineError):
    """The model cannot be served; the message is one sentence for a person."""


class NotEnoughMemory(EngineError):
    """Weights or KV blocks do not fit."""

    def __init__(self, what: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"{what} needs {needed_bytes / 2**20:,.0f} MiB, but {available_bytes / 2**20:,.0f} MiB are available"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
