"""`kernels.fixed_step` for Triton kernels: index arrays as `kernels.triton.plan` has them, each as long as it may get.

Grids are for the most items that a form has. How many there are is among the arrays: programs beyond it end at once.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.attention_rule import AttentionRule
from kernels.batch import AttentionBatch, DrawBatch, Int32Array, KVShape
from kernels.fixed_step import StepForm, StepLimits
from kernels.mirrored_arrays import MirroredArrays
from kernels.triton.draw import DrawArrays, launch_draw
from kernels.triton.plan import NodePlan, PlanNumbers, TailPlan, TritonPlan, find_tile_rows, number_plan
from kernels.triton.tiles import Tiles

Arrays = dict[str, npt.NDArray[Any]]


class TritonFixedStep:
    """As `kernels.fixed_step.FixedStep`."""

    scratch: torch.Tensor
    """Where its launches put parts: held here, as kernels that need more later take other memory."""

    def __init__(
        self,
        limits: StepLimits,
        shape: KVShape,
        tiles: Tiles,
        rule: AttentionRule,
        device: torch.device,
        *,
        group: int,
        vocab_size: int,
    ) -> None:
        """group: query heads of one KV head."""
        self._num_rows = rows = limits.num_rows
        self._num_items = _find_num_items(limits, tiles.piece_tokens)
        items = self._num_items[-1]
        # a row has parts of nodes beside those of its tail: as many again, and two that are not full
        self._num_parts = parts = 2 * (items + rows)
        self._shape = shape
        self._tiles = tiles
        self._rule = rule
        self._group = group
        self._vocab_size = vocab_size
        self._tile_rows = find_tile_rows(rows * group, tiles)
        i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64
        self._draws = {"temperatures": f32, "top_ks": i32, "top_ps": f64, "min_ps": f64, "seeds": i64, "choices": i32}
        self._tails = {"item_rows": items, "item_pieces": items, "tail_blocks": rows, "tail_tokens": rows}
        self._tails |= {"item_count": 1, "tail_first": rows, "tail_parts": rows, "row_parts": rows + 1}
        self._tails |= {"merged_rows": rows}
        self._nodes = {"item_nodes": items, "item_tiles": items, "item_pieces": items, "item_count": 1}
        self._nodes |= {"node_blocks": items, "node_tokens": items, "node_readers": items + 1}
        self._nodes |= {"reader_rows": parts, "reader_first": parts, "reader_parts": parts}
        # a part is of at most so many blocks
        self._num_blocks = parts * -(-tiles.piece_tokens // shape.block_size)
        self._arrays = MirroredArrays(
            {
                "token_ids": (rows, i32),
                "positions": (rows, i32),
                "slots": (rows, i32),
                **{f"draw {name}": (rows, dtype) for name, dtype in self._draws.items()},
                "draw positions": (rows, i64),
                **{f"tails {name}": (count, i32) for name, count in self._tails.items()},
                **{f"nodes {name}": (count, i32) for name, count in self._nodes.items()},
                "blocks": (self._num_blocks, i32),
            },
            device,
        )
        # until something is written there are no rows
        here = self._arrays.begin()
        here["slots"][:] = -1
        here["tails merged_rows"][:] = range(rows)
        self._arrays.upload("blocks", 0)
        there = self._arrays.device
        self._draw_arrays = DrawArrays(
            **{name: there[f"draw {name}"] for name in self._draws}, positions=there["draw positions"]
        )

    @property
    def num_parts(self) -> int:
        """For which the kernels need memory, at an address that stays."""
        return self._num_parts

    @property
    def token_ids(self) -> torch.Tensor:
        return self._arrays.device["token_ids"]

    @property
    def positions(self) -> torch.Tensor:
        return self._arrays.device["positions"]

    @property
    def forms(self) -> list[StepForm]:
        has_nodes = [False, True] if self._num_rows > 1 else [False]
        return [StepForm(num_items, has) for num_items in self._num_items for has in has_nodes]

    def plan(self, form: StepForm) -> TritonPlan:
        there, num_items = self._arrays.device, form.num_items
        nodes = None
        if form.has_nodes:
            arrays = {name: there[f"nodes {name}"] for name in self._nodes}
            nodes = NodePlan(num_items=num_items, tile_rows=self._tile_rows, **arrays)
        arrays = {name: there[f"tails {name}"] for name in self._tails}
        tails = TailPlan(num_items=num_items, num_parts=self._num_parts, **arrays)
        return TritonPlan(self._shape, there["slots"], there["blocks"], nodes, tails, extends=None)

    def try_write(
        self, token_ids: Int32Array, positions: Int32Array, attention: AttentionBatch, draw: DrawBatch
    ) -> StepForm | None:
        num_rows = attention.num_decodes
        assert num_rows == len(token_ids) == len(attention.slots)
        if num_rows > self._num_rows:
            return None
        numbers = number_plan(attention, self._shape, self._group, self._tiles, self._rule, self._tile_rows)
        num_items = max(numbers.num_items("tails"), numbers.num_items("nodes"))
        enough = [num for num in self._num_items if num >= num_items]
        num_blocks = len(numbers.arrays["step"]["blocks"])
        if not enough or numbers.num_parts("tails") > self._num_parts or num_blocks > self._num_blocks:
            return None
        here = self._arrays.begin()
        self._write_rows(here, token_ids, positions, draw)
        self._write_plan(here, numbers)
        self._arrays.upload("blocks", num_blocks)
        return StepForm(enough[0], numbers.num_items("nodes") > 0)

    def _write_rows(self, here: Arrays, token_ids: Int32Array, positions: Int32Array, draw: DrawBatch) -> None:
        num_rows = len(token_ids)
        for name, values in (("token_ids", token_ids), ("positions", positions)):
            here[name][:num_rows] = values
            here[name][num_rows:] = 0
        for name in (*self._draws, "positions"):
            here[f"draw {name}"][:num_rows] = getattr(draw, name)
        top_ks = here["draw top_ks"][:num_rows]
        top_ks[top_ks >= self._vocab_size] = 0  # all of them is no filter, and draws alike
        here["draw temperatures"][num_rows:] = 0.0

    def _write_plan(self, here: Arrays, numbers: PlanNumbers) -> None:
        arrays = numbers.arrays
        num_rows = len(arrays["step"]["slots"])
        here["slots"][:num_rows] = arrays["step"]["slots"]
        here["slots"][num_rows:] = -1
        for group in ("tails", "nodes"):
            for name, values in arrays[group].items():
                here[f"{group} {name}"][: len(values)] = values
        # the rows behind have no part, and are zeros
        here["tails merged_rows"][:] = range(self._num_rows)
        here["tails row_parts"][num_rows:] = numbers.num_parts("tails")
        here["blocks"][: len(arrays["step"]["blocks"])] = arrays["step"]["blocks"]

    def draw(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        launch_draw(logits, self._draw_arrays, drawn)


def _find_num_items(limits: StepLimits, piece_tokens: int) -> list[int]:
    """Ascending."""
    tokens = sorted({min(number, limits.max_tokens) for number in limits.row_tokens})
    num_items = [limits.num_rows * -(-number // piece_tokens) for number in tokens]
    num_items[-1] += -(-limits.max_tokens // piece_tokens)
    return num_items
