"""Sizes in bytes as people write them: 4096, 512MiB, 1.5GB."""

import re

_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("kB", "MB", "GB", "TB")
UNITS = {
    "": 1,
    "b": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY, 1)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, 1)},
}


def parse_byte_size(text: str) -> int:
    """Whole bytes; the unit in any case. Raises ValueError, which says what would have been right."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in UNITS:
        units = ", ".join((*_BINARY, *_DECIMAL))
        raise ValueError(f"{text!r} is not a size: a number of bytes is wanted, or one with a unit ({units})")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]
