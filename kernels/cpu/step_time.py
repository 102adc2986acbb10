"""How long the compiled decoder takes for a decode step, by its number of threads; for `trunkline doctor`.

A program of its own, without torch, as the package `kernels` is not for the gateway's processes. Weights and cache are
zeros: what is computed with makes no difference to the time.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kernels.batch import AttentionBatch, Tail
from kernels.cpu.build import NativeUnavailable, find_library
from kernels.cpu.native import LAYER_WEIGHTS, DecoderShape, NativeDecoder, NativeLibrary, StepArrays

NUM_ROWS = 8
ROW_BLOCKS = 16
BUDGET_S = 0.6
ELEMENTS: dict[str, type[np.generic]] = {"bfloat16": np.uint16, "float32": np.float32}


def measure(library: NativeLibrary, shape: DecoderShape, dtype: str, thread_counts: list[int]) -> dict[int, float]:
    """The median milliseconds of a step of `NUM_ROWS` rows for each of the counts, which take turns."""
    steps = {count: _Step(library, shape, dtype, count) for count in thread_counts}
    taken: dict[int, list[float]] = {count: [] for count in steps}
    for step in steps.values():
        step()  # takes its memory
    end = time.perf_counter() + BUDGET_S
    while not taken[thread_counts[-1]] or time.perf_counter() < end:
        for count, step in steps.items():
            start = time.perf_counter()
            step()
            taken[count].append((time.perf_counter() - start) * 1000)
    return {count: statistics.median(times) for count, times in taken.items()}


class _Step:
    def __init__(self, library: NativeLibrary, shape: DecoderShape, dtype: str, num_threads: int) -> None:
        element = ELEMENTS[dtype]
        num_tokens, num_blocks = ROW_BLOCKS * shape.block_size, NUM_ROWS * ROW_BLOCKS
        most_columns = max(shape.vocab_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
        self._weights = np.zeros(max(most_columns, shape.hidden_size) * shape.hidden_size, element)
        self._floats = np.zeros(max(shape.hidden_size, num_tokens * shape.head_dim), np.float32)
        self._decoder = NativeDecoder(library, shape, num_threads, huge_pages=True)
        weight, number = self._weights.ctypes.data, self._floats.ctypes.data
        self._decoder.set_outer(weight, weight, number, number, number, num_positions=num_tokens)
        layer_addresses = dict.fromkeys(LAYER_WEIGHTS, weight)
        layer_addresses |= dict.fromkeys(("input_norm", "post_attention_norm"), number)
        for layer in range(shape.num_layers):
            self._decoder.set_layer(layer, layer_addresses)
        sizes = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._kv = np.empty(sizes, element)
        self._kv.fill(0)  # written, as pages that never were are all one page
        tables = [range(i * ROW_BLOCKS, (i + 1) * ROW_BLOCKS) for i in range(NUM_ROWS)]
        last_slots = [(table[-1] + 1) * shape.block_size - 1 for table in tables]
        self._arrays = StepArrays.of(AttentionBatch(last_slots, [Tail(table, num_tokens) for table in tables]))
        self._token_ids = np.zeros(NUM_ROWS, np.int32)
        self._positions = np.full(NUM_ROWS, num_tokens - 1, np.int32)
        self._residual = np.empty((NUM_ROWS, shape.hidden_size), np.float32)
        self._logits = np.empty((NUM_ROWS, shape.vocab_size), np.float32)

    def __call__(self) -> None:
        kv, residual, num_blocks = self._kv.ctypes.data, self._residual.ctypes.data, self._kv.shape[2]
        self._decoder.forward(self._token_ids, self._positions, self._arrays, kv, num_blocks, residual)
        self._decoder.logits(residual, NUM_ROWS, self._logits.ctypes.data)


def main(cache_dir: str, dtype: str, shape: str, *thread_counts: str) -> int:
    """Prints JSON: rows and milliseconds by threads; null if there is no compiled decoder in `cache_dir`.

    shape: the fields of `DecoderShape`, as JSON.
    """
    try:
        library = find_library("bfloat16" if dtype == "bfloat16" else "float32", Path(cache_dir))
    except NativeUnavailable:
        library = None
    if library is None:
        print("null")
        return 0
    times = measure(library, DecoderShape(**json.loads(shape)), dtype, [int(count) for count in thread_counts])
    print(json.dumps({"rows": NUM_ROWS, "step_ms": times}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
