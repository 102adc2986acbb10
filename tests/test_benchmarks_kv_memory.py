"""What chats over one trunk hold in blocks, beyond what their tokens need."""

from benchmarks.kv_memory import BLOCK_SIZE, TrunkWithChats, kv_memory


def test_chats_of_a_trunk_that_fills_its_blocks_hold_what_their_own_tokens_need() -> None:
    assert TrunkWithChats(4 * BLOCK_SIZE, 5, seed=3).most_beyond_needed() == 0


def test_a_chat_holds_a_block_more_at_most_where_the_trunk_ends_in_mid_block() -> None:
    figures = kv_memory(4, 64, seed=1)
    assert figures["trunk_tokens"] == [64, 79]
    assert [bar["value"] for bar in figures["blocks_a_chat_beyond_needed"].values()] == [0, 1]
