"""Steps of decode rows alone, from the newest tokens to the next ones, each launched by one call.

For numbers of rows that are powers of two, and for the most that there may be, everything that a step reads has its
place (`kernels.fixed_step`), and what it launches is captured when the engine starts. A step is written into the
smallest that holds it, and its launches are made again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.graph_capture import GraphCapture
from engine.models.decoder import Decoder
from kernels.batch import AttentionBatch, DrawBatch, Int32Array, KVShape
from kernels.fixed_step import FixedStep, StepForm, StepLimits

ROW_TOKENS = (1024, 8192)
"""Of a row's own, on average, for which there are graphs. Programs that find nothing to do cost a little each, so that
short answers have graphs with fewer of them."""


def find_row_counts(max_rows: int) -> list[int]:
    """Ascending: the powers of two below it, and itself."""
    return [1 << exponent for exponent in range((max_rows - 1).bit_length())] + [max_rows]


class DrawnIds:
    """What steps have drawn, on its way to the host: of the last two of them."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._device = torch.zeros(2 * max_rows, dtype=torch.int64, device=device)
        self._sides = [_HostIds(max_rows, is_gpu=is_gpu) for _ in range(2)]

    def of(self, num_rows: int) -> torch.Tensor:
        """Where a step of so many rows draws to: int64 [2, num_rows], ids and whether they were drawn."""
        return self._device[: 2 * num_rows].view(2, num_rows)

    def send(self, num_rows: int) -> "_HostIds":
        """Nothing waits for it."""
        self._sides.reverse()
        host = self._sides[0]
        host.ids[: 2 * num_rows].copy_(self._device[: 2 * num_rows], non_blocking=True)
        if host.arrived is not None:
            host.arrived.record()
        return host


class _HostIds:
    def __init__(self, max_rows: int, *, is_gpu: bool) -> None:
        self.ids = torch.zeros(2 * max_rows, dtype=torch.int64, pin_memory=is_gpu)
        self.arrived = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def wait(self, num_rows: int) -> tuple[list[int], list[int]]:
        """For what a step of so many rows has drawn: ids, and 1, or 0 where the id says nothing."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ids, is_drawn = self.ids[: 2 * num_rows].view(2, num_rows).tolist()
        return ids, is_drawn


@dataclass(frozen=True, slots=True)
class _Bucket:
    num_rows: int
    step: FixedStep
    graphs: dict[StepForm, Callable[[], object]]


@dataclass(slots=True)
class GraphStep:
    """One step, brought to the device."""

    num_rows: int
    logits: torch.Tensor
    """fp32 [num_rows, vocab_size], on the device, from its launch to the next one's."""
    _bucket: _Bucket
    _form: StepForm
    _drawn: DrawnIds
    _on_host: _HostIds | None = None

    def launch(self) -> None:
        """Everything up to the copy of the drawn ids to the host; nothing waits."""
        self._bucket.graphs[self._form]()
        self._on_host = self._drawn.send(self._bucket.num_rows)

    def wait(self) -> tuple[list[int], list[bool]]:
        """Before the launch of the step behind the next one. Ids drawn, and whether the largest logit of a row is
        finite; if not, its id says nothing."""
        assert self._on_host is not None, "it has not been launched"
        ids, is_drawn = self._on_host.wait(self._bucket.num_rows)
        return ids[: self.num_rows], [bool(x) for x in is_drawn[: self.num_rows]]


class DecodeGraphs:
    """For each of `row_counts`, ascending, of rows of up to `max_tokens` tokens, over a cache `kv` as `Decoder.forward`
    takes it. row_tokens: as `kernels.fixed_step.StepLimits` has it."""

    def __init__(
        self,
        decoder: Decoder,
        kv: torch.Tensor,
        shape: KVShape,
        capture: GraphCapture,
        *,
        row_counts: Sequence[int],
        max_tokens: int,
        row_tokens: tuple[int, ...] = ROW_TOKENS,
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        max_rows = row_counts[-1]
        self._logits = torch.empty(max_rows, decoder.config.vocab_size, dtype=torch.float32, device=kv.device)
        self._drawn = DrawnIds(max_rows, kv.device)
        self._buckets: list[_Bucket] = []
        # the largest first: what the others allocate fits into what it has allocated
        for num_rows in reversed(row_counts):
            step = decoder.fixed_step(StepLimits(num_rows, row_tokens, max_tokens), shape)
            if step is None:
                return
            graphs = {
                form: capture.capture(partial(self._launch, step, num_rows, form)) for form in reversed(step.forms)
            }
            self._buckets.insert(0, _Bucket(num_rows, step, graphs))

    @property
    def num_graphs(self) -> int:
        return sum(len(bucket.graphs) for bucket in self._buckets)

    def try_write(
        self, token_ids: Int32Array | None, positions: Int32Array, attention: AttentionBatch, draw: DrawBatch
    ) -> GraphStep | None:
        """A step of decode rows, on the device and not launched yet; None if no graph holds it.

        token_ids None: those that the last step, which had the same rows, draws; nobody waits for them. At most one
        step may be on its way then whose ids were not waited for.
        """
        num_rows = len(positions)
        for bucket in self._buckets:
            if bucket.num_rows >= num_rows:
                known = np.zeros(num_rows, dtype=np.int32) if token_ids is None else token_ids
                form = bucket.step.try_write(known, positions, attention, draw)
                if form is None:
                    return None
                if token_ids is None:
                    bucket.step.token_ids[:num_rows].copy_(self._drawn.of(bucket.num_rows)[0, :num_rows])
                return GraphStep(num_rows, self._logits[:num_rows], bucket, form, self._drawn)
        return None

    def _launch(self, step: FixedStep, num_rows: int, form: StepForm) -> None:
        hidden = self._decoder.forward_on_device(step.token_ids, step.positions, self._kv, step.plan(form), num_rows)
        logits = self._decoder.logits(hidden, out=self._logits[:num_rows])
        step.draw(logits, self._drawn.of(num_rows))
