"""Pages are taken in the order of blocks, in every plane of the cache, and never twice."""

import torch

from engine.pages_ahead import PAGE_BYTES, PagesAhead

BLOCK_BYTES = PAGE_BYTES // 4


class Touched:
    """Notes where it was asked to touch, by plane and block."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self.blocks: list[tuple[int, int]] = []

    def __call__(self, address: int, num_bytes: int) -> None:
        first, rest = divmod(address - self._kv.data_ptr(), BLOCK_BYTES)
        assert rest == 0
        assert num_bytes % BLOCK_BYTES == 0
        for i in range(first, first + num_bytes // BLOCK_BYTES):
            self.blocks.append(divmod(i, self._kv.shape[2]))

    def take(self) -> list[tuple[int, int]]:
        blocks, self.blocks = self.blocks, []
        return blocks


def cache(num_blocks: int) -> torch.Tensor:
    """One layer: two planes."""
    return torch.empty(1, 2, num_blocks, 1, 8, BLOCK_BYTES // 16, dtype=torch.bfloat16)


def test_what_lies_ahead_is_taken_in_steps_of_a_page() -> None:
    kv = cache(23)
    touched = Touched(kv)
    pages = PagesAhead(kv, touched, ahead_bytes=2 * 6 * BLOCK_BYTES)

    pages.use(0)
    pages.wait()
    # four blocks to a page, then what is left of the seven
    assert touched.take() == [(plane, b) for blocks in ((0, 1, 2, 3), (4, 5, 6)) for plane in (0, 1) for b in blocks]
    assert pages.num_blocks_taken == 7

    pages.use(3)
    pages.wait()
    assert touched.take() == []  # three are missing, which is less than a page

    pages.use(5)
    pages.wait()
    assert touched.take() == [(plane, b) for blocks in ((7, 8, 9, 10), (11,)) for plane in (0, 1) for b in blocks]

    pages.use(20)
    pages.wait()
    assert sorted(touched.take()) == [(plane, b) for plane in (0, 1) for b in range(12, 23)]

    pages.use(22)
    pages.wait()
    assert touched.take() == []


def test_the_last_ones_are_taken_though_they_are_less_than_a_page() -> None:
    kv = cache(5)
    touched = Touched(kv)
    pages = PagesAhead(kv, touched, ahead_bytes=2 * 3 * BLOCK_BYTES)
    pages.use(0)
    pages.wait()
    touched.take()
    pages.use(1)
    pages.wait()
    assert touched.take() == [(0, 4), (1, 4)]
