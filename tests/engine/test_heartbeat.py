"""When silence counts."""

from engine.heartbeat import Heartbeat


def test_silence_is_counted_while_somebody_listens() -> None:
    heartbeat = Heartbeat(timeout_s=30.0, interval_s=10.0, looked_at_s=0.0)
    assert [heartbeat.look(now) for now in (10.0, 20.0, 29.0, 30.0)] == [False, False, False, True]
    heartbeat.beat()
    assert [heartbeat.look(now) for now in (40.0, 50.0, 60.0)] == [False, False, True]


def test_whoever_was_stopped_itself_blames_nobody() -> None:
    heartbeat = Heartbeat(timeout_s=30.0, interval_s=10.0, looked_at_s=0.0)
    assert not heartbeat.look(100_000.0)
    assert not heartbeat.look(0.0), "the clock was put back"
    assert heartbeat.look(10.0)
