"""`python -m engine '<EngineConfig as JSON>'`: starts one engine process.

Exit codes: 0 after SIGTERM; 2 if it can never start like this (one sentence on stderr says why); 1 if it broke.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineError
from engine.parent_death import die_with_parent
from engine.prepared import PreparedModel
from engine.process import serve

LAST_S = 10.0
"""When another rank has gone the process ends within this time, even if a device waits for that rank in vain."""


def main(arguments: list[str]) -> int:
    """Raises whatever breaks the engine while it serves."""
    if len(arguments) != 1:
        print(f"expected one argument, the engine's configuration as JSON, got {len(arguments)}", file=sys.stderr)
        return 2
    die_with_parent()
    # Read by OpenMP when torch is loaded. Threads that spin at the end of each operation take the cores from the
    # gateway, and from each other as soon as anything else runs: five times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.basicConfig(format="engine: %(message)s", level=logging.INFO)
    try:
        config = msgspec.json.decode(arguments[0], type=EngineConfig)
        model = PreparedModel.load(config.model_dir)
        # here and not above: a wrong argument is told at once, torch takes seconds
        from engine.model_runner import ModelRunner

        runner = ModelRunner(model, config)
        core = runner.make_core()
    except EngineDeadError as e:
        print(e, file=sys.stderr)
        return 1
    except (EngineError, msgspec.MsgspecError) as e:
        print(e, file=sys.stderr)
        return 2
    print(runner.plan, flush=True)

    def listen(stop: Callable[[EngineDeadError], None]) -> None:
        def on_lost_rank(failure: EngineDeadError) -> None:
            stop(failure)
            end = threading.Timer(LAST_S, os._exit, (1,))
            end.daemon = True
            end.start()

        runner.listen(on_lost_rank)

    with contextlib.closing(runner):
        serve(core, runner.info, config.address, lease_s=config.lease_s, listen=listen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
