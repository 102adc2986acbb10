import pytest

from app.errors import BadRequest
from app.events import InputText, OutputText
from app.response_input import parse_input


def parts(value):
    return [(item.role, item.content) for item in parse_input(value, 10)]


def test_a_string_is_one_user_message():
    assert parts("Hi") == [("user", [InputText(text="Hi")])]
    assert parts("") == [("user", [InputText(text="")])]


def test_messages_in_all_forms():
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
    ]  # fmt: skip
    assert parts(given) == [
        ("developer", [InputText(text="Be brief.")]),
        ("user", [InputText(text="a"), InputText(text="b")]),
        ("assistant", [OutputText(text="c")]),
    ]


def test_each_item_gets_an_id_of_its_own():
    items = parse_input([{"role": "user", "content": "a"}] * 3, 10)
    assert len({item.id for item in items}) == 3


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (None, "input", "missing_required_parameter"),
        (3, "input", "invalid_value"),
        ({}, "input", "invalid_value"),
        ([], "input", "invalid_value"),
        ([{"role": "user", "content": "x"}] * 11, "input", "invalid_value"),
        (["x"], "input[0]", "invalid_value"),
        ([{"role": "user", "content": "x"}, {"role": 3}], "input[1].role", "invalid_value"),
        ([{"role": "user", "content": None}], "input[0].content", "invalid_value"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "invalid_value"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "input[0].content[0].text", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type", "unsupported_parameter"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].type", "unsupported_parameter"),
        ([{"type": ["x"]}], "input[0].type", "invalid_value"),
    ],
)  # fmt: skip
def test_b23_what_is_wrong_is_named(value, param, code):
    with pytest.raises(BadRequest) as refused:
        parse_input(value, 10)
    assert (refused.value.param, refused.value.code) == (param, code)
