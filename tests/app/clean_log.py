"""A log that has to stay without errors."""

import contextlib
import gc
import logging
from collections.abc import Iterator

LOGGERS = ("", "uvicorn")
"""uvicorn's own hands nothing up to the root."""


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.faults.append(logging.Formatter().format(record))


@contextlib.contextmanager
def clean_log() -> Iterator[None]:
    """Meanwhile nothing may be logged as an error, nor with a traceback: not by asyncio either, about what nobody
    awaited. To be entered when a gateway runs: it sets uvicorn's log up when it starts."""
    keeper = _Keeper()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(keeper)
    try:
        yield
        gc.collect()
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(keeper)
    assert keeper.faults == []
