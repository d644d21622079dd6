"""All commands of `lockstep`. Nothing here imports torch before a command needs it."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

import lockstep
from lockstep.cli.bench import bench_command
from lockstep.cli.board import board_command
from lockstep.cli.ckpt import app as ckpt_app
from lockstep.cli.compare import compare_command
from lockstep.cli.doctor import doctor_command
from lockstep.cli.fetch import fetch_command
from lockstep.cli.generate import generate_command
from lockstep.cli.jobs import jobs_command
from lockstep.cli.lab import app as lab_app
from lockstep.cli.plan import plan_command
from lockstep.cli.report import report_command
from lockstep.cli.run import run_command
from lockstep.cli.submit import submit_command
from lockstep.cli.train import train_command
from lockstep.cli.verify import verify_command
from lockstep.cli.watch import watch_command
from lockstep.errors import UserError

app = typer.Typer(
    name="lockstep",
    help="One training script, the same numbers on any parallel layout.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(run_command)
app.command("submit", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(
    submit_command
)
app.command("jobs")(jobs_command)
app.command("watch")(watch_command)
app.command("verify")(verify_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("compare")(compare_command)
app.command("bench")(bench_command)
app.command("fetch")(fetch_command)
app.command("generate")(generate_command)
app.command("board")(board_command)
app.command("report")(report_command)
app.add_typer(ckpt_app)
app.add_typer(lab_app)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """One training script, the same numbers on any parallel layout."""


def run_app() -> int:
    """Run the command of this process; returns its exit code."""
    try:
        code: int = app(standalone_mode=False)
    except UserError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        # The usage errors of typer; their class moved between versions, their format_message did not.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        print(f"lockstep: {error.format_message()} (see lockstep --help)", file=sys.stderr)
        code = 2
    gc.freeze()  # else Python looks through all objects once more at its end, for a second or two
    return code
