"""The C++ decoder behind ctypes: its structures, and calls with arrays turned into pointers.

No torch here, so that the self-test runs in a child that starts quickly; callers hand in addresses.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kernels.batch import AttentionBatch, Extend, Int32Array, KVQuantisation, Tail

_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p


def _structure(name: str, **fields: object) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


MAX_HEAD_DIM = 256
"""As csrc/records.h has it."""
MIN_ROOM = 4
"""Blocks; and as many as a run has, so that it is rarely that one has to be copied for want of room."""
LAYER_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
LAYER_BIASES = tuple(f"{name}_bias" for name in LAYER_WEIGHTS)
LAYER_NORMS = ("input_norm", "post_attention_norm", "q_norm", "k_norm")

_KV_FORMATS: dict[KVQuantisation | None, int] = {None: 0, "int8": 1, "fp8": 2}
"""As csrc/records.h has them."""

# as csrc/interface.h has them
_Shape = _structure(
    "Shape",
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"), _INT
    ),
    **dict.fromkeys(("block_size", "num_threads", "uses_huge_pages", "kv_format"), _INT),
    rms_norm_eps=ctypes.c_float,
)
_Layer = _structure("Layer", **dict.fromkeys((*LAYER_WEIGHTS, *LAYER_BIASES, *LAYER_NORMS), _POINTER))
_Outer = _structure("Outer", **dict.fromkeys(("embedding", "head", "norm", "cosines", "sines"), _POINTER))
_ROW_ARRAYS = ("token_ids", "positions")
_STEP_ARRAYS = (
    *(*_ROW_ARRAYS, "slots", "run_rows", "run_tokens", "run_outputs", "run_tables"),
    *("node_tables", "node_readers", "readers", "block_ids"),
)
_Step = _structure(
    "Step",
    kv=_POINTER,
    num_blocks=ctypes.c_int64,
    **dict.fromkeys(("num_layers", "num_rows", "num_runs", "num_nodes"), _INT),
    **dict.fromkeys(_STEP_ARRAYS, _POINTER),
)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    block_size: int
    quantisation: KVQuantisation | None = None
    """Of the cache."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What attention reads in one step, as the C++ side takes it: offsets into one list of block ids.

    A decode row's table has room for further blocks behind those it needs, so that the next step can go on from here.
    """

    slots: Int32Array
    run_rows: Int32Array
    run_tokens: Int32Array
    run_outputs: Int32Array
    run_tables: Int32Array
    node_tables: Int32Array
    node_readers: Int32Array
    readers: Int32Array
    block_ids: Int32Array
    lowest_block_id: int
    highest_block_id: int
    step: ctypes.Structure = field(init=False, repr=False)
    """Points to all of these arrays."""

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in _STEP_ARRAYS if name not in _ROW_ARRAYS}
        step = _Step(
            num_rows=len(self.slots),
            num_runs=len(self.run_rows),
            num_nodes=len(self.node_tables) - 1,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        object.__setattr__(self, "step", step)

    @classmethod
    def of(cls, batch: AttentionBatch) -> "StepArrays":
        block_ids: list[int] = []
        readers: list[int] = []
        node_tables, node_readers = [0], [0]
        for node in batch.nodes:
            block_ids += node.block_ids
            readers += node.rows
            node_tables.append(len(block_ids))
            node_readers.append(len(readers))
        run_tables = [len(block_ids)]
        for tail in batch.tails:
            block_ids += tail.block_ids
            block_ids += (tail.block_ids[-1],) * max(MIN_ROOM, len(tail.block_ids))
            run_tables.append(len(block_ids))
        for extend in batch.extends:
            block_ids += extend.block_ids
            run_tables.append(len(block_ids))
        runs: list[Tail | Extend] = [*batch.tails, *batch.extends]
        all_block_ids = int32_array(block_ids)
        return cls(
            slots=int32_array(batch.slots),
            run_rows=int32_array([1] * batch.num_decodes + [extend.num_rows for extend in batch.extends]),
            run_tokens=int32_array([run.num_tokens for run in runs]),
            run_outputs=int32_array([1] * batch.num_decodes + [extend.num_outputs for extend in batch.extends]),
            run_tables=int32_array(run_tables),
            node_tables=int32_array(node_tables),
            node_readers=int32_array(node_readers),
            readers=int32_array(readers),
            block_ids=all_block_ids,
            lowest_block_id=int(all_block_ids.min()),
            highest_block_id=int(all_block_ids.max()),
        )

    def try_put_block(self, run: int, index: int, block_id: int) -> bool:
        """Into a decode row's table, from where its nodes end; False if it has no room. One of `slots` is in it."""
        place = self.run_tables[run] + index
        if place >= self.run_tables[run + 1]:
            return False
        self.block_ids[place] = block_id
        return True


def int32_array(values: Sequence[int] | Int32Array) -> Int32Array:
    """The array itself if it is one already."""
    return np.asarray(values, dtype=np.int32)


class NativeLibrary:
    """A compiled csrc/library.cpp."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        self.path = path
        library = ctypes.CDLL(str(path))
        library.trunkline_create.restype = _POINTER
        library.trunkline_create.argtypes = [_POINTER]
        library.trunkline_destroy.restype = None
        library.trunkline_destroy.argtypes = [_POINTER]
        library.trunkline_touch.restype = None
        library.trunkline_touch.argtypes = [_POINTER, ctypes.c_size_t]
        for name, arguments in {
            "set_outer": [_POINTER, _POINTER],
            "set_layer": [_POINTER, _INT, _POINTER],
            "forward": [_POINTER, _POINTER, _POINTER],
            "logits": [_POINTER, _POINTER, _INT, _POINTER],
            "greedy": [_POINTER, _POINTER, _INT, _POINTER],
            "attention": [_POINTER, _INT, _POINTER, _POINTER, _POINTER],
            "linear": [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER],
        }.items():
            function = getattr(library, f"trunkline_{name}")
            function.restype = ctypes.c_int
            function.argtypes = arguments
        self.functions = library

    def touch(self, address: int, num_bytes: int) -> None:
        """Takes pages of memory; what others write there meanwhile stays."""
        self.functions.trunkline_touch(address, num_bytes)


class NativeDecoder:
    """Weights packed into memory of its own, and the threads that compute steps over them.

    Every address is that of a contiguous array whose length the shape gives. Raises MemoryError, and IndexError for a
    step that would read or write outside of the cache, the tables of rotations or the embedding.
    """

    def __init__(self, library: NativeLibrary, shape: DecoderShape, num_threads: int, *, huge_pages: bool) -> None:
        self.shape = shape
        self._num_positions = 0
        self._functions = library.functions
        fields = {name: getattr(shape, name) for name in DecoderShape.__slots__ if name != "quantisation"}
        kv_format = _KV_FORMATS[shape.quantisation]
        native = _Shape(**fields, num_threads=num_threads, uses_huge_pages=huge_pages, kv_format=kv_format)
        self._handle = self._functions.trunkline_create(ctypes.byref(native))
        if not self._handle:
            raise MemoryError(f"no memory for the packed weights of {shape}")

    def close(self) -> None:
        """Idempotent; nothing else may be called afterwards."""
        handle, self._handle = self._handle, None
        if handle:
            self._functions.trunkline_destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def set_outer(self, embedding: int, head: int, norm: int, cosines: int, sines: int, *, num_positions: int) -> None:
        """embedding and head in the element type, the rest fp32; cosines, sines [num_positions, head_dim].

        All but head and norm must stay where they are.
        """
        self._num_positions = num_positions
        outer = _Outer(embedding=embedding, head=head, norm=norm, cosines=cosines, sines=sines)
        self._check(self._functions.trunkline_set_outer(self._handle, ctypes.byref(outer)))

    def set_layer(self, layer: int, addresses: dict[str, int]) -> None:
        """By the names LAYER_WEIGHTS (element type), LAYER_BIASES and LAYER_NORMS (fp32); what is missing is none."""
        native = _Layer(**addresses)
        self._check(self._functions.trunkline_set_layer(self._handle, layer, ctypes.byref(native)))

    def forward(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        arrays: StepArrays,
        kv: int,
        num_blocks: int,
        residual: int,
        num_layers: int | None = None,
    ) -> None:
        """Writes K and V of the rows, and their residual stream, fp32 [rows, hidden_size], behind the last layer (or
        behind num_layers)."""
        _check_range("token id", token_ids, self.shape.vocab_size)
        _check_range("position", positions, self._num_positions)
        step = self._step(arrays, kv, num_blocks, num_layers)
        step.token_ids, step.positions = token_ids.ctypes.data, positions.ctypes.data
        self._check(self._functions.trunkline_forward(self._handle, ctypes.byref(step), residual))

    def logits(self, residual: int, num_rows: int, logits: int) -> None:
        """logits: fp32 [rows, vocab_size]."""
        self._check(self._functions.trunkline_logits(self._handle, residual, num_rows, logits))

    def greedy(self, residual: int, num_rows: int, ids: int) -> None:
        """ids: int32 [rows], of each row's largest logit, the least of equal ones; -1 if it is not finite."""
        self._check(self._functions.trunkline_greedy(self._handle, residual, num_rows, ids))

    def attention(self, layer: int, arrays: StepArrays, kv: int, num_blocks: int, q: int, out: int) -> None:
        """q, out: [rows, num_heads * head_dim]; K and V are written already."""
        step = self._step(arrays, kv, num_blocks)
        self._check(self._functions.trunkline_attention(self._handle, layer, ctypes.byref(step), q, out))

    def linear(self, layer: int, which: int, x: int, num_rows: int, out: int) -> None:
        """which: 0 qkv, 1 o, 2 gate and up (16 columns of each in turn), 3 down. out: fp32, columns filled up to a
        multiple of 32; without bias."""
        self._check(self._functions.trunkline_linear(self._handle, layer, which, x, num_rows, out))

    def _step(self, arrays: StepArrays, kv: int, num_blocks: int, num_layers: int | None = None) -> Any:
        _check_range("slot", arrays.slots, num_blocks * self.shape.block_size)
        _check_limits("block id", arrays.lowest_block_id, arrays.highest_block_id, num_blocks)
        step: Any = arrays.step
        step.kv, step.num_blocks = kv, num_blocks
        step.num_layers = self.shape.num_layers if num_layers is None else num_layers
        return step

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise MemoryError("no memory for the activations of a step")


def _check_range(what: str, values: Int32Array, limit: int) -> None:
    # a negative number is a very large one without its sign: one pass
    if values.view(np.uint32).max(initial=0) >= limit:
        _check_limits(what, int(values.min()), int(values.max()), limit)


def _check_limits(what: str, lowest: int, highest: int, limit: int) -> None:
    if lowest < 0 or highest >= limit:
        raise IndexError(f"{what}s from {lowest} to {highest}, expected 0 to {limit - 1}")
