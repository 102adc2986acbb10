"""The C++ decoder behind ctypes: its structures, and calls with arrays turned into pointers.

No torch here, so that the self-test runs in a child that starts quickly; callers hand in addresses.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.batch import AttentionBatch, Extend, Tail

Int32Array = npt.NDArray[np.int32]
_INT, _POINTER = ctypes.c_int32, ctypes.c_void_p


def _structure(name: str, **fields: object) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


MAX_HEAD_DIM = 256
"""As csrc/pieces.h has it."""
LAYER_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
LAYER_BIASES = tuple(f"{name}_bias" for name in LAYER_WEIGHTS)
LAYER_NORMS = ("input_norm", "post_attention_norm", "q_norm", "k_norm")

# as csrc/interface.h has them
_Shape = _structure(
    "Shape",
    **dict.fromkeys(
        ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size"), _INT
    ),
    **dict.fromkeys(("block_size", "num_threads", "uses_huge_pages"), _INT),
    rms_norm_eps=ctypes.c_float,
)
_Layer = _structure("Layer", **dict.fromkeys((*LAYER_WEIGHTS, *LAYER_BIASES, *LAYER_NORMS), _POINTER))
_Outer = _structure("Outer", **dict.fromkeys(("embedding", "head", "norm", "cosines", "sines"), _POINTER))
_STEP_ARRAYS = (
    *("token_ids", "positions", "slots", "run_rows", "run_tokens", "run_tables"),
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


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What attention reads in one step, as the C++ side takes it: offsets into one list of block ids."""

    slots: Int32Array
    run_rows: Int32Array
    run_tokens: Int32Array
    run_tables: Int32Array
    node_tables: Int32Array
    node_readers: Int32Array
    readers: Int32Array
    block_ids: Int32Array

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
        runs: list[Tail | Extend] = [*batch.tails, *batch.extends]
        run_tables = [len(block_ids)]
        for run in runs:
            block_ids += run.block_ids
            run_tables.append(len(block_ids))
        return cls(
            slots=_int32(batch.slots),
            run_rows=_int32([1] * batch.num_decodes + [extend.num_rows for extend in batch.extends]),
            run_tokens=_int32([run.num_tokens for run in runs]),
            run_tables=_int32(run_tables),
            node_tables=_int32(node_tables),
            node_readers=_int32(node_readers),
            readers=_int32(readers),
            block_ids=_int32(block_ids),
        )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


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
        for name, arguments in {
            "set_outer": [_POINTER, _POINTER],
            "set_layer": [_POINTER, _INT, _POINTER],
            "forward": [_POINTER, _POINTER, _POINTER],
            "logits": [_POINTER, _POINTER, _INT, _POINTER],
            "attention": [_POINTER, _INT, _POINTER, _POINTER, _POINTER],
            "linear": [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER],
        }.items():
            function = getattr(library, f"trunkline_{name}")
            function.restype = ctypes.c_int
            function.argtypes = arguments
        self.functions = library


class NativeDecoder:
    """Weights packed into memory of its own, and the threads that compute steps over them.

    Every address is that of a contiguous array whose length the shape gives. Raises MemoryError, and IndexError for a
    step that would read or write outside of the cache, the tables of rotations or the embedding.
    """

    def __init__(self, library: NativeLibrary, shape: DecoderShape, num_threads: int, *, huge_pages: bool) -> None:
        self.shape = shape
        self._num_positions = 0
        self._functions = library.functions
        fields = {name: getattr(shape, name) for name in DecoderShape.__slots__}
        native = _Shape(**fields, num_threads=num_threads, uses_huge_pages=huge_pages)
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
        step = self._step(arrays, kv, num_blocks, num_layers, token_ids, positions)
        self._check(self._functions.trunkline_forward(self._handle, ctypes.byref(step), residual))

    def logits(self, residual: int, num_rows: int, logits: int) -> None:
        """logits: fp32 [rows, vocab_size]."""
        self._check(self._functions.trunkline_logits(self._handle, residual, num_rows, logits))

    def attention(self, layer: int, arrays: StepArrays, kv: int, num_blocks: int, q: int, out: int) -> None:
        """q, out: [rows, num_heads * head_dim]; K and V are written already."""
        step = self._step(arrays, kv, num_blocks)
        self._check(self._functions.trunkline_attention(self._handle, layer, ctypes.byref(step), q, out))

    def linear(self, layer: int, which: int, x: int, num_rows: int, out: int) -> None:
        """which: 0 qkv, 1 o, 2 gate and up (16 columns of each in turn), 3 down. out: fp32, columns filled up to a
        multiple of 32; without bias."""
        self._check(self._functions.trunkline_linear(self._handle, layer, which, x, num_rows, out))

    def _step(
        self,
        arrays: StepArrays,
        kv: int,
        num_blocks: int,
        num_layers: int | None = None,
        token_ids: Int32Array | None = None,
        positions: Int32Array | None = None,
    ) -> ctypes.Structure:
        _check_range("slot", arrays.slots, num_blocks * self.shape.block_size)
        _check_range("block id", arrays.block_ids, num_blocks)
        pointers = {name: getattr(arrays, name).ctypes.data for name in StepArrays.__slots__}
        if token_ids is not None and positions is not None:
            _check_range("token id", token_ids, self.shape.vocab_size)
            _check_range("position", positions, self._num_positions)
            pointers.update(token_ids=token_ids.ctypes.data, positions=positions.ctypes.data)
        return _Step(
            kv=kv,
            num_blocks=num_blocks,
            num_layers=self.shape.num_layers if num_layers is None else num_layers,
            num_rows=len(arrays.slots),
            num_runs=len(arrays.run_rows),
            num_nodes=len(arrays.node_tables) - 1,
            **pointers,
        )

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise MemoryError("no memory for the activations of a step")


def _check_range(what: str, values: Int32Array, limit: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < limit):
        raise IndexError(f"{what}s from {values.min()} to {values.max()}, expected 0 to {limit - 1}")
