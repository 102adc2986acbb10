"""Finds stop strings in text that arrives in pieces, and says how much of it may already be shown."""

import re
from collections.abc import Iterable


class StopAutomaton:
    """Stop strings made ready to be looked for, once for all choices of a request (Aho-Corasick). Never changes.

    A state is the longest end of a text that could still become a stop; 0 is the empty text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises ValueError for an empty stop string."""
        self.stops = tuple(stops)
        if not all(self.stops):
            raise ValueError(f"stop strings must not be empty, got {list(self.stops)!r}")
        self._next: list[dict[str, int]] = [{}]  # trie
        self._depth = [0]
        self._fail = [0]
        self._match: list[str | None] = [None]
        for stop in self.stops:
            self._insert(stop)
        self._link()
        self.starts = re.compile("|".join({re.escape(stop[0]) for stop in self.stops}) or r"(?!)")
        """Finds where a stop could begin; everything before leaves state 0 as it is."""

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._match.append(None)
                self._next[state][character] = following
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Breadth first: each state's longest proper end that is a state too, and what it matches if not more."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def depth(self, state: int) -> int:
        """Characters of the text that a state stands for."""
        return self._depth[state]

    def match(self, state: int) -> str | None:
        """The longest stop that a text in this state ends with."""
        return self._match[state]


class StopStrings:
    """The first stop string to be *complete* wins; of those that end at one place the longest.

    That does not depend on how the text was cut into pieces, and each character costs the same whatever was held back.
    """

    def __init__(self, stops: Iterable[str] | StopAutomaton, *, include_in_output: bool = False) -> None:
        """Raises ValueError for an empty stop string."""
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self.matched: str | None = None
        """The stop string that was found: nothing is taken any more."""
        self._include_in_output = include_in_output
        self._held = ""  # what the state stands for: seen, not yet shown
        self._state = 0

    @property
    def has_any(self) -> bool:
        """Whether there is something to look for."""
        return bool(self._automaton.stops)

    def feed(self, text: str) -> str:
        """Takes the next text and returns what can be shown by now: all but an end that could become a stop."""
        if self.matched is not None:
            return ""
        automaton, seen = self._automaton, self._held + text
        position, state = len(self._held), self._state
        while position < len(seen):
            if state == 0:
                start = automaton.starts.search(seen, position)
                if start is None:
                    break
                position = start.start()
            state = automaton.step(state, seen[position])
            position += 1
            stop = automaton.match(state)
            if stop is not None:
                self.matched, self._held = stop, ""
                return seen[: position if self._include_in_output else position - len(stop)]
        self._state = state
        cut = len(seen) - automaton.depth(state)
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """The text has ended: what was held back is text after all."""
        held, self._held, self._state = self._held, "", 0
        return held
