"""What is told of something that failed, so that it can be mended without the machine on which it did."""

import traceback
from collections.abc import Callable

from benchmarks.document import Document
from benchmarks.gpu_device import Device, OutOfTime

MAX_CHARACTERS = 6000


def failure_of(error: BaseException) -> Document:
    """The end of the traceback is kept: a compiler's error may be a book."""
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": text[-MAX_CHARACTERS:]}


def note(device: Device, found: Document, name: str, measure: Callable[[], Document]) -> None:
    """What `measure` gives, or how it failed, comes into `found`. Raises OutOfTime, and what a device answers on which
    nothing can be computed any more."""
    try:
        found[name] = measure()
    except OutOfTime:
        raise
    except Exception as error:  # noqa: BLE001 what fails must not hide what the others do
        found[name] = {**failure_of(error), "holds": False}
        device.synchronize()
