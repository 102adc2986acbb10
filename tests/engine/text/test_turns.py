from engine.text.turns import Turn, readings


def shown(turns: list[Turn]) -> str:
    return " ".join(f"{turn.role}={turn.content!r}" for turn in turns)


def test_readings_go_from_the_least_change_to_the_greatest() -> None:
    roles = ["system", "system", "user", "system", "user", "assistant", "assistant"]
    turns = [Turn(role, content) for role, content in zip(roles, "abcdefg", strict=True)]
    assert [shown(list(reading)) for reading in readings(turns)] == [
        "system='a' system='b' user='c' system='d' user='e' assistant='f' assistant='g'",
        "system='a\\n\\nb' user='c' system='d' user='e' assistant='f\\n\\ng'",
        "system='a' system='b' user='c' user='d\\n\\ne' assistant='f' assistant='g'",
        "system='a\\n\\nb' user='c\\n\\nd\\n\\ne' assistant='f\\n\\ng'",
        "user='a\\n\\nb\\n\\nc' user='d\\n\\ne' assistant='f' assistant='g'",
        "user='a\\n\\nb\\n\\nc\\n\\nd\\n\\ne' assistant='f\\n\\ng'",
    ]


def test_a_system_turn_that_no_user_follows_becomes_a_user_turn() -> None:
    *_, folded = readings([Turn("user", "a"), Turn("assistant", "b"), Turn("system", "c")])
    assert shown(list(folded)) == "user='a' assistant='b' user='c'"


def test_joined_turns_skip_empty_contents_and_keep_thoughts() -> None:
    assert Turn("user", "").joined(Turn("user", "b")) == Turn("user", "b")
    joined = Turn("assistant", "a", "x").joined(Turn("assistant", "b", "y"))
    assert joined == Turn("assistant", "a\n\nb", "x\n\ny")


def test_thoughts_reach_a_template_only_where_there_are_some() -> None:
    assert Turn("user", "a").to_dict() == {"role": "user", "content": "a"}
    assert Turn("assistant", "a", "x").to_dict() == {"role": "assistant", "content": "a", "reasoning_content": "x"}
