"""`lockstep generate`: let a trained language model go on from a text."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer


def generate_command(
    run: opt.Run,
    text: Annotated[str, typer.Argument(help="What the model goes on from.")],
    length: Annotated[int, typer.Option(help="How much to generate: bytes, for the recipe lm.")] = 200,
    temperature: Annotated[float, typer.Option(help="Lower is safer, higher is livelier.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Another seed gives another text.")] = 0,
    step: Annotated[str, typer.Option(help="Which of the run's checkpoints: a number, best or last.")] = "best",
    as_json: opt.Json = False,
) -> int:
    """Let the language model of a run go on from a text."""
    from lockstep.load_run import generate

    made = generate(run, text, length=length, temperature=temperature, seed=seed, step=step)
    if as_json:
        answer({"run": str(run), "prompt": text, "text": made})
    else:
        print(text + made)
    return 0
