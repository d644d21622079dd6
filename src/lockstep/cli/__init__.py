"""The `lockstep` command. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys

from lockstep.runtime import stop_signals

TRAIN = ("run", "train")
"""Commands that a scheduler stops, with a code that says so."""


def main() -> None:
    """Run a command. Wrong input is one sentence on stderr and exit code 2."""
    if sys.argv[1:2] and sys.argv[1] in TRAIN:
        stop_signals.listen(stop_signals.stop_the_command)  # first: what follows takes a while to import
    try:
        from lockstep.cli.app import run_app

        code = run_app()
    except stop_signals.StopError as stop:
        print(f"lockstep: ended by {stop.number.name} before the training began", file=sys.stderr)
        code = stop.code
    if sys.argv[1:2] and sys.argv[1] in TRAIN:
        stop_signals.ignore()
    sys.exit(code)
