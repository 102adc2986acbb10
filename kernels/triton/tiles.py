"""How each kernel is cut into programs on each architecture: a table, as nothing is tuned while serving.

The figures are chosen by what the compilers report (registers, spills, shared memory); none was timed on a device yet.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        # fused multiply-adds are said outright: Triton announces that a later version leaves them out unless asked
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of tiles are powers of two."""

    piece_tokens: int = 256
    """Of a tail or node that one program reads: one part; of an extend that is cut, the fewest. A multiple of
    `tile_tokens`."""
    tile_tokens: int = 64
    """Keys of one product; at least 16."""
    max_node_rows: int = 64
    """(reader, head) pairs of one program of a node; fewer if no node of the step has so many. At least 16."""
    extend_rows: int = 64
    """(token, head) pairs of one program of an extend; at least 16."""
    split_programs: int = 264
    """Programs that extends are cut into where there would be fewer: two for each multiprocessor."""
    merge_heads: int = 4
    pointwise_values: int = 4096
    """Of one program of a norm, a rotation or an activation."""
    draw_tokens: int = 4096
    """Of the vocabulary that a pass takes at a time."""
    search_tokens: int = 1024
    """Likewise where a pass keeps sixteen sums."""
    tails: Launch = Launch(4, 2)
    nodes: Launch = Launch(4, 2)
    extends: Launch = Launch(4, 2)
    merge: Launch = Launch(2, 1)
    pointwise: Launch = Launch(4, 1)
    draw: Launch = Launch(8, 1)


DEFAULT = Tiles()
BY_ARCHITECTURE = {
    # four warps cannot hold the sums of 64 rows of heads of 128 in their registers
    "sm_80": Tiles(nodes=Launch(8, 2), extends=Launch(8, 2), split_programs=216),
    # nor, of groups of 7 heads, with scales or windows beside them
    "sm_90": Tiles(nodes=Launch(8, 2)),
    "gfx942": Tiles(split_programs=608),
}
"""Where an architecture ("sm_80", "sm_90", "gfx942") wants others."""


def tiles_for(device: torch.device) -> Tiles:
    if device.type != "cuda":
        return DEFAULT
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        architecture = properties.gcnArchName.partition(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return BY_ARCHITECTURE.get(architecture, DEFAULT)
