"""Which ranks of a replica have ended or hang, and why: one of them is enough for no further step to work."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import EngineDeadError
from engine.heartbeat import Heartbeat
from engine.rank_messages import BEAT_S, Channel, RankFailed

SILENCE_S = 10.0
"""A rank that says nothing for so long hangs: it was stopped, or one of its threads does not let the others run."""
CULPRIT_S = 1.0
"""Those that lost another rank may be noticed before it: so long is waited for a better reason."""


@dataclass(frozen=True, slots=True)
class FollowingRank:
    """A rank behind the first, as the first one sees it."""

    rank: int
    size: int
    process: subprocess.Popen[bytes]
    channel: Channel

    def describe_end(self, words: RankFailed | None) -> str:
        """Once its process has been waited for."""
        code = self.process.wait()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        said = "" if words is None else f": {words.reason}"
        return f"rank {self.rank} of {self.size} {how}{said}"


@dataclass
class RankWatch:
    """Told by one thread for each rank. `is_closing`: ends are no news any more."""

    is_closing: bool = False
    beat_s: float = BEAT_S
    silence_s: float = SILENCE_S
    clock: Callable[[], float] = time.monotonic
    _reasons: list[str] = field(default_factory=list)
    _victims: list[str] = field(default_factory=list)
    _listener: Callable[[EngineDeadError], None] | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def watch(self, follower: FollowingRank) -> None:
        """Returns when the rank has ended, or was killed because it hangs, and all has been told. To be called once its
        start is over."""
        words = None
        heartbeat = Heartbeat(self.silence_s, self.beat_s, self.clock())
        while not heartbeat.look(self.clock()):
            if not follower.channel.has_come(self.beat_s):
                continue
            message = follower.channel.receive_answer()
            if message is None:
                is_victim = words is not None and words.is_victim
                return self._add(follower.describe_end(words), is_victim)
            heartbeat.beat()
            if isinstance(message, RankFailed):
                words = message
        follower.process.kill()
        # not waited for: its process may be past being killed
        self._add(f"rank {follower.rank} of {follower.size} said nothing for {self.silence_s:g} s and was killed")

    def _add(self, reason: str, is_victim: bool = False) -> None:
        with self._changed:
            (self._victims if is_victim else self._reasons).append(reason)
            self._changed.notify_all()
        if not self.is_closing:
            self._tell()

    def listen(self, listener: Callable[[EngineDeadError], None]) -> None:
        """Called once, from another thread, when a rank has ended; now, if one has."""
        with self._changed:
            self._listener = listener
            has_ended = bool(self._reasons or self._victims)
        if has_ended:
            self._tell()

    def wait_for_reason(self, timeout_s: float) -> str | None:
        """Of the first rank that ended by itself; else of one that lost another; None if none ends within the time."""
        with self._changed:
            self._changed.wait_for(lambda: self._reasons, timeout_s)
            return next(iter([*self._reasons, *self._victims]), None)

    def check(self) -> None:
        """Raises EngineDeadError if a rank has ended."""
        if self._reasons or self._victims:
            raise EngineDeadError(str(self.wait_for_reason(CULPRIT_S)), is_crash=True)

    def say(self, reason: str) -> None:
        """The first rank itself can compute no further step."""
        with self._changed:
            self._reasons.append(reason)

    def _tell(self) -> None:
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener(EngineDeadError(str(self.wait_for_reason(CULPRIT_S)), is_crash=True))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
