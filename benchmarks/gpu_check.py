"""What has to be seen on a GPU, in one run of at most six minutes: whether every kernel is right, and how fast it is.

    PYTHONPATH=. python3 -m benchmarks.gpu_check --output gpu.json --picture gpu.png

torch, triton and numpy are all it needs. Sections are measured by a process of their own (`benchmarks.gpu_sections`)
that is started again if it ends: one that fails, breaks the device or hangs has that in the document, what there was of
it is kept, and the others go on. The document is written after each section. A picture whose name ends in .png needs
matplotlib; without it, or with another name, it is an SVG. `--dry-run` interprets the kernels on a processor with tiny
shapes: it shows that all of it runs, and says nothing of time. The exit code is 1 if something is wrong, failed or is
missing, or, but for a dry run, a bar does not hold.
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.document import Document, all_hold, new_document
from benchmarks.gpu_bars import bars_of, ratios_of, summary, wrong_of
from benchmarks.gpu_picture import draw_picture
from benchmarks.gpu_work import DRY, ON_A_DEVICE

REPOSITORY = Path(__file__).resolve().parents[1]
SECTIONS = {
    "machine": 5.0,
    "ceilings": 10.0,
    "correctness": 75.0,
    "attention": 60.0,
    "moves": 15.0,
    "decode": 65.0,
    "prompts": 15.0,
    "draws": 15.0,
    "nodes": 20.0,
    "tiles": 40.0,
}
"""Seconds after which a section begins nothing new, in the order in which they are measured."""
WHOLE_S = 345.0
GRACE_S = 30.0
"""What was begun may take so much longer, the start of the process counted in, before it is ended."""
START_S = 60.0


class Check:
    """Sections measured by processes started one after the other."""

    def __init__(
        self,
        command: list[str],
        seconds: Mapping[str, float],
        report: Callable[[str, Document], None],
        *,
        environment: Mapping[str, str] | None = None,
        whole_s: float = WHOLE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """command: what `NAME=SECONDS` of the sections is appended to. report: is told of each section once."""
        self._command = command
        self._left = dict(seconds)
        self._report = report
        self._environment = environment
        self._end = time.monotonic() + whole_s
        self._grace_s = grace_s

    def run(self) -> None:
        while self._left and time.monotonic() < self._end:
            self._run_process()
        for name in self._left:
            self._report(name, {"killed": "not begun: the time of all was used up"})
        self._left.clear()

    def _run_process(self) -> None:
        """Until it ends or is ended. At least one section is reported and no longer left."""
        arguments = [f"{name}={seconds}" for name, seconds in self._left.items()]
        process = subprocess.Popen([*self._command, *arguments], stdout=subprocess.PIPE, env=self._environment)
        assert process.stdout is not None
        # what it dies of before it says anything is put down to the section that it was to begin with
        current: str | None = next(iter(self._left))
        deadline = time.monotonic() + START_S + self._left[current] + self._grace_s
        so_far: Document = {}
        why = ""
        try:
            lines = Lines(process.stdout.fileno())
            while (line := lines.next(min(deadline, self._end))) is not None:
                said = json.loads(line)
                if "begins" in said:
                    current, so_far = said["begins"], {}
                    deadline = time.monotonic() + self._left[current] + self._grace_s
                elif "finds" in said:
                    so_far[said["finds"]] = said["found"]
                else:
                    current = None
                    del self._left[said["ends"]]
                    self._report(said["ends"], said["found"])
        except TimeoutError:
            why = "it took too long and was ended"
            process.kill()
        finally:
            process.wait()
            process.stdout.close()
        if current is not None:
            del self._left[current]
            self._report(current, {**so_far, "killed": why or f"its process ended with {process.returncode}"})


class Lines:
    """What comes through a pipe, line by line, and no longer waited for than until a moment."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)

    def next(self, deadline: float) -> bytes | None:
        """None at the end. Raises TimeoutError when the monotonic clock has passed `deadline`."""
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            read = os.read(self._descriptor, 1 << 16)
            if not read:
                return None
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    names = [name for name in SECTIONS if name in options.sections or not options.sections]
    command = [sys.executable, "-m", "benchmarks.gpu_sections"]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if options.dry_run:
        command.append("--dry-run")
        environment["TRITON_INTERPRET"] = "1"
    sizes = DRY if options.dry_run else ON_A_DEVICE
    document: Document = {**new_document(), "dry_run": options.dry_run}

    def write() -> None:
        if options.output:
            options.output.write_text(json.dumps(document, indent=1) + "\n")

    def report(name: str, found: Document) -> None:
        print(summary(name, found), flush=True)
        document[name] = found
        write()

    seconds = {name: SECTIONS[name] for name in names}
    Check(command, seconds, report, environment=environment).run()
    document["ratios"] = ratios_of(document, sizes)
    document["bars"] = bars_of(document, document["ratios"], sizes)
    document["wrong"] = wrong_of({name: document[name] for name in names})
    write()
    if options.picture:
        print(f"picture: {draw_picture(document, options.picture)}")
    for name, found in document["bars"].items():
        print(f"{name}: {json.dumps(found)}")
    for each in document["wrong"]:
        print(f"WRONG {each}"[:400])
    missing = [name for name in names if document[name].keys() & {"killed", "out_of_time"}]
    print(f"wrong: {len(document['wrong'])}, not finished: {missing or 'none'}")
    sys.exit(1 if document["wrong"] or missing or not (options.dry_run or all_hold(document["bars"])) else 0)


if __name__ == "__main__":
    main()
