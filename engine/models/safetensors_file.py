"""The safetensors format, read as views into a memory map and written one tensor at a time.

Eight bytes little-endian header length, a JSON header name -> {dtype, shape, data_offsets}, then the data.
"""

import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelNotSupported

MAX_HEADER_BYTES = 100 * 2**20
DTYPES: dict[str, torch.dtype] = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
DTYPES["BF16"] = torch.bfloat16
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: Path) -> dict[str, Any]:
    """name -> {dtype, shape, data_offsets}, offsets counted from the end of the header."""
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        header = file.read(size) if size <= MAX_HEADER_BYTES else b""
    if len(header) != size:
        raise ModelNotSupported(f"{path} is not a whole safetensors file: its header is cut off or too long")
    try:
        tensors = json.loads(header)
    except ValueError:
        raise ModelNotSupported(f"{path} is not a safetensors file: its header is not JSON") from None
    tensors.pop("__metadata__", None)
    end = 8 + size + max((t["data_offsets"][1] for t in tensors.values()), default=0)
    if path.stat().st_size < end:
        raise ModelNotSupported(f"{path} is cut off: it has {path.stat().st_size} bytes, expected {end}")
    return dict(tensors)


class SafetensorsFile:
    """One open file. Tensors are views of the map: they live as long as it does and cost no memory of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        with path.open("rb") as file:
            self._data_start = 8 + struct.unpack("<Q", file.read(8))[0]
            # a private map may be written to without touching the file, which is what torch asks of a buffer
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t["shape"]) for name, t in self.header.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Raises ModelNotSupported if its dtype is not a plain floating-point one (the file is quantised)."""
        entry = self.header[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelNotSupported(
                f"tensor {name} of {self.path} is stored as {entry['dtype']}: quantised safetensors cannot be served"
            )
        shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ModelNotSupported(f"tensor {name} of {self.path} has {end - start} bytes, which is not {shape}")
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._data_start + start).view(shape)


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    written: Callable[[int, int], None],
) -> None:
    """Writes tensors as they come, each cast to `dtype`; memory holds one at a time.

    Every name of `shapes` has to come exactly once, in any order. `written(done_bytes, total_bytes)` is called after
    each.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 64)
    missing = set(shapes)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        start = file.tell()
        for name, tensor in tensors:
            missing.remove(name)
            if tuple(tensor.shape) != shapes[name]:
                raise ModelNotSupported(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
            data = tensor.to(dtype).contiguous()
            file.seek(start + header[name]["data_offsets"][0])
            file.write(data.reshape(-1).view(torch.uint8).numpy().data)
            done += data.nbytes
            written(done, offset)
        file.truncate(start + offset)
    if missing:
        raise ModelNotSupported(f"the source has no tensor {min(missing)} ({len(missing)} are missing)")
