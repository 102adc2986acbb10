import pytest

from app.ids import ResponseId, new_message_id, new_response_id, try_parse_response_id


def test_an_id_comes_back_from_its_text():
    response_id = new_response_id()
    assert try_parse_response_id(str(response_id)) == response_id
    assert len(str(response_id)) == 5 + 22 + 22


def test_a_child_shares_the_root_and_nothing_else():
    parent = new_response_id()
    child = parent.child()
    assert child.root == parent.root
    assert child.node != parent.node
    assert child.relative(parent.node) == parent


@pytest.mark.parametrize(
    "text",
    ["", "nope", "resp_", "resp_" + "0" * 32, "resp_" + "0" * 43, "resp_" + "0" * 45, "msg_" + "0" * 44,
     "resp_" + "0" * 43 + "\n", "resp_" + "0" * 43 + "٣", "resp_" + "{" * 44, "resp_" + "x" * 3000, "*", "\x00"],
)  # fmt: skip
def test_hostile_ids_are_no_ids(text):
    assert try_parse_response_id(text) is None


def test_b42_ids_cannot_be_guessed():
    """2,000 ids of one conversation differ, also in any half of their random part."""
    root = new_response_id()
    nodes = [root.child().node for _ in range(2000)]
    assert len({node[:11] for node in nodes}) == len({node[11:] for node in nodes}) == 2000
    assert len({new_message_id() for _ in range(100)}) == 100


def test_a_null_id_parses_but_is_never_made():
    assert try_parse_response_id("resp_" + "0" * 44) == ResponseId("0" * 22, "0" * 22)
