"""When it pays to read blocks once for several decode rows. Plain numbers, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

DETERMINISTIC_TOKENS = 256
"""Attention is cut at multiples of so many tokens from position 0 (kernels/cpu/csrc/pieces.h has the same number)."""


class NodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a node saves of one layer's processor time: `(readers - 1) * tokens * read_s - readers * merge_s - node_s`.

    A tail reads each of its tokens for one row, a node for all its readers; what there is to compute for each token and
    reader is the same in both.
    """

    read_s: NotNegative
    """To bring one token to where it is computed with."""
    merge_s: NotNegative
    """To bring one reader's result of the node together with that of its tail."""
    node_s: NotNegative


USUAL_NODE_COST = NodeCost(read_s=3e-8, merge_s=2e-7, node_s=8e-6)
"""As the demo model has it on one core, for where nothing was measured."""


class NodeTiming(msgspec.Struct, frozen=True):
    """Rows that read `num_nodes` runs of blocks, each with its own readers: with nodes and without."""

    num_nodes: int
    num_tokens: int
    num_readers: int
    """Of one node each."""
    nodes_s: float
    flat_s: float


def fit_cost(timings: Sequence[NodeTiming]) -> NodeCost:
    """The costs, none below 0, that tell what was saved with the least errors relative to the time without nodes.

    Errors count by their size, not its square, as one timing may be far off on a busy machine.
    """
    flat = np.array([timing.flat_s for timing in timings])
    saved = flat - [timing.nodes_s for timing in timings]
    columns = np.array([[(t.num_readers - 1) * t.num_tokens, -t.num_readers, -1.0] for t in timings])
    columns *= np.array([timing.num_nodes for timing in timings])[:, None]
    columns, saved = columns / flat[:, None], saved / flat
    weights = np.ones(len(timings))
    for _ in range(20):
        costs = _least_squares(columns * weights[:, None], saved * weights)
        weights = np.abs(columns @ costs - saved).clip(min=0.001) ** -0.5
    return NodeCost(read_s=costs[0], merge_s=costs[1], node_s=costs[2])


def _least_squares(columns: Array, values: Array) -> list[float]:
    """None below 0: what would be is left out."""
    costs = [0.0] * columns.shape[1]
    free = list(range(columns.shape[1]))
    while free:
        found, *_ = np.linalg.lstsq(columns[:, free], values, rcond=None)
        if found.min() >= 0.0:
            for i, cost in zip(free, found, strict=True):
                costs[i] = float(cost)
            break
        del free[int(found.argmin())]
    return costs


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Which shared blocks become nodes."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: where `cost` says that it pays; always: all that two rows share."""
    cost: NodeCost = USUAL_NODE_COST
    unit_tokens: int = 1
    """Nodes begin and end at multiples of so many tokens, and of the block size."""
