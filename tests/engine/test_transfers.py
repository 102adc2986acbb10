"""What a step moves stays where it is until the step is over."""

from engine.block_pool import BlockPool
from engine.scheduled_batch import BlockCopy, Transfers
from engine.transfers import PendingTransfers


def test_both_ends_of_a_copy_are_held_until_the_step_is_over():
    pool = BlockPool(3)
    transfers = PendingTransfers(pool)
    source, target = pool.try_allocate(2)
    transfers.copy(source, target)
    assert transfers.take() == Transfers(copies=(BlockCopy(1, 2),))
    assert transfers.take() == Transfers()
    assert [block.block_id for block in transfers.holders()] == [1, 2]
    assert (transfers.is_target(target), transfers.is_target(source)) == (True, False)
    pool.release([target])  # its sequence was aborted
    assert (source.ref_count, target.ref_count) == (1, 1)
    transfers.settle()
    assert (source.ref_count, target.ref_count) == (0, 0)
    assert not transfers.is_target(target)
    transfers.settle()  # a step without any
    pool.check_integrity()
