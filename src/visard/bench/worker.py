"""One run in a process of its own: a JSON object with the run in, a JSON object a line out.

The first line of standard input is the run; when standard input ends, the run stops after its round.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from visard.errors import Interrupted, VisardError


def say(kind: str, *values: Any) -> None:
    """One line to the process that started this one."""
    sys.stdout.write(json.dumps([kind, *values]) + "\n")
    sys.stdout.flush()


class Teller:
    """A watcher that passes everything on; see `engines.loop.Watcher`."""

    def rendering(self, done: int, total: int) -> None:
        say("rendering", done, total)

    def round(self, stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
        say("round", stage, step, steps, figures)

    def evaluation(self, figures: dict[str, Any]) -> None:
        say("evaluation", figures)

    def problem(self, text: str) -> None:
        say("problem", text)


def stop_at_end_of_input() -> None:
    """The starter closed the pipe, or has ended: as if somebody had pressed Ctrl-C."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=stop_at_end_of_input, daemon=True).start()
    try:
        from visard.runs import run

        run(job["preset"], overrides=job["overrides"], out=job["out"], resume=job["resume"],
            overwrite=job["overwrite"], watcher=Teller())  # fmt: skip
        say("finished")
    except (KeyboardInterrupt, Interrupted):
        say("interrupted")
    except VisardError as error:
        say("failed", str(error))
    except Exception as error:
        say("failed", f"internal error: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


if __name__ == "__main__":
    main()
