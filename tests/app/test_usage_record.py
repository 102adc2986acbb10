"""Rows of the usage ledger, and the times in them."""

import csv

import msgspec

from app.usage_record import CSV_HEAD, AnswerTimes, UsageRecord, from_json, iso_time, to_csv, to_json


def record(record_id: str = "resp_1", **changes: object) -> UsageRecord:
    usual = UsageRecord(
        id=record_id,
        created_at="2026-11-30T12:00:00.000Z",
        tenant="a",
        assistant=None,
        model="m",
        outcome="completed",
        prompt_tokens=10,
        trunk_tokens=4,
        history_tokens=3,
        computed_tokens=3,
        output_tokens=5,
        queue_ms=1.5,
        prefill_ms=2.0,
        decode_ms=30.25,
    )
    return msgspec.structs.replace(usual, **changes)


def test_rows_in_both_forms() -> None:
    row = record(model='of "some", kind', assistant="support")
    assert from_json(to_json(row)) == row
    [head, line] = csv.reader([CSV_HEAD, to_csv(row)])
    assert dict(zip(head, line, strict=True)) == {k: str(v) for k, v in msgspec.structs.asdict(row).items()}
    assert "\n" not in to_csv(row) + to_json(row).decode()
    assert row.day == "2026-11-30"


def test_times_in_utc() -> None:
    assert iso_time(0.0) == "1970-01-01T00:00:00.000Z"
    assert iso_time(86400.25) == "1970-01-02T00:00:00.250Z"


def test_times_of_an_answer_add_up() -> None:
    now = 100.0
    times = AnswerTimes(lambda: now, now)
    assert (times.queue_ms, times.prefill_ms, times.decode_ms) == (0.0, 0.0, 0.0)
    now = 101.0
    times.tokens_came(250.0)
    now = 101.5
    times.tokens_came(400.0)  # of another choice
    now = 103.0
    times.tokens_came(None)
    assert (times.queue_ms, times.prefill_ms, times.decode_ms) == (250.0, 750.0, 2000.0)


def test_a_queue_is_never_longer_than_the_wait_for_the_first_token() -> None:
    """The engine's clock is another one."""
    times = AnswerTimes(lambda: 1.0, 0.5)
    times.tokens_came(900.0)
    assert (times.queue_ms, times.prefill_ms) == (500.0, 0.0)


def test_in_a_pause_no_time_passes() -> None:
    now = 100.0
    times = AnswerTimes(lambda: now, now)

    def pause(seconds: float) -> None:
        nonlocal now
        times.pause()
        now += seconds
        times.go_on()

    now += 1.0
    pause(50.0)
    now += 1.0
    times.tokens_came(500.0)
    now += 3.0
    pause(70.0)
    now += 1.0
    times.tokens_came(None)
    pause(20.0)
    assert (times.queue_ms, times.prefill_ms, times.decode_ms) == (500.0, 1500.0, 4000.0)


def test_what_came_just_when_it_was_paused_takes_no_negative_time() -> None:
    now = 100.0
    times = AnswerTimes(lambda: now, now)
    times.pause()
    now = 101.0
    times.tokens_came(None)
    now = 110.0
    times.go_on()
    times.tokens_came(None)
    assert (times.prefill_ms, times.decode_ms) == (1000.0, 0.0)
