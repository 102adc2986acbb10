"""What a backend that draws by itself is told of the rows of a step."""

import numpy as np

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from kernels.batch import DrawBatch

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class DrawBatches:
    """Only positions change while the same sequences go on, so that the rest is kept for them."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._batch: DrawBatch | None = None

    def of(self, sequences: list[Sequence]) -> DrawBatch:
        """A list that comes again must not have changed."""
        positions = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int64)
        if self._batch is None or self._sequences is not sequences:
            self._sequences, self._batch = sequences, _make_batch(sequences, positions)
        else:
            self._batch.positions[:] = positions
        return self._batch


def _make_batch(sequences: list[Sequence], positions: np.ndarray) -> DrawBatch:
    params = [sequence.params for sequence in sequences]
    return DrawBatch(
        temperatures=np.array([_temperature(p) for p in params], dtype=np.float32),
        top_ks=np.array([max(p.top_k, 0) for p in params], dtype=np.int32),
        top_ps=np.array([p.top_p for p in params], dtype=np.float64),
        min_ps=np.array([p.min_p for p in params], dtype=np.float64),
        seeds=np.array([sequence.seed % 2**64 for sequence in sequences], dtype=np.uint64).view(np.int64),
        choices=np.array([sequence.choice for sequence in sequences], dtype=np.int32),
        positions=positions,
    )


def _temperature(params: SamplingParams) -> float:
    return 0.0 if params.is_greedy else min(params.temperature, _MAX_FLOAT32)
