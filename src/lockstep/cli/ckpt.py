"""`lockstep ckpt`: look at checkpoints, check them, compare them, and turn them into other files and back."""

from __future__ import annotations

import datetime
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as opt
from lockstep.cli.answers import answer, complain, open_terminal, plain_table
from lockstep.errors import UserError
from lockstep.text.units import bytes_text

if TYPE_CHECKING:
    from lockstep.checkpoint.disk.format import Index

app = typer.Typer(
    name="ckpt",
    help="List, verify, compare, export and import checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Step = Annotated[str, typer.Option(help="Which of a run's checkpoints: a number, best or last.")]
DTYPES = ("fp32", "bf16", "fp16")


@app.command("ls")
def ls_command(run: opt.Run, as_json: opt.Json = False) -> int:
    """List the checkpoints of a run: step, time, size, layout, and whether they look whole."""
    from lockstep.checkpoint.disk.format import DamageError, open_checkpoint, shown, step_folder
    from lockstep.checkpoint.disk.pick import run_steps

    rows: list[dict[str, Any]] = []
    for step in run_steps(run):
        row: dict[str, Any] = {"step": step, "folder": str(step_folder(run, step)), "best": False}
        row |= dict.fromkeys(("bytes", "layout", "time", "attempt", "loss", "problem", "emergency"))
        rows.append(row)
        try:
            index = open_checkpoint(step_folder(run, step)).index
        except DamageError as error:
            row["problem"] = str(error)
            continue
        row |= {"bytes": index.bytes, "layout": index.layout, "time": index.time, "attempt": index.attempt}
        if training := index.training:
            row |= {"loss": training.loss, "emergency": training.emergency}
            for other in rows if training.best else ():
                other["best"] = training.best is not None and other["step"] == training.best.step
    if as_json:
        answer({"run": str(run), "checkpoints": rows})
        return 0
    table = plain_table("step", "saved", "size", "layout", "loss", "verdict")
    for row in rows:
        verdict = f"damaged: {row['problem']}" if row["problem"] else "whole, the best" if row["best"] else "whole"
        if row["emergency"]:
            verdict += f", saved in an emergency ({shown(row['emergency'], 120)})"
        loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
        size = "" if row["bytes"] is None else bytes_text(row["bytes"])
        when = "" if row["time"] is None else f"{datetime.datetime.fromtimestamp(row['time']):%Y-%m-%d %H:%M:%S}"
        table.add_row(str(row["step"]), when, size, row["layout"] or "", loss, verdict)
    terminal = open_terminal()
    terminal.print(table)
    terminal.print(
        f"\nby indices and sizes; lockstep ckpt verify {shlex.quote(str(run))} reads everything", soft_wrap=True
    )
    return 0


@app.command("verify")
def verify_command(run: opt.Run, as_json: opt.Json = False) -> int:
    """Read every byte of a checkpoint, or of all of a run's, and check it; exit 1 names the bad file."""
    from lockstep.checkpoint.disk.files import verify_checkpoint
    from lockstep.checkpoint.disk.format import DamageError, is_checkpoint, step_folder
    from lockstep.checkpoint.disk.pick import run_steps

    is_one = is_checkpoint(run)
    if is_one and not run.is_dir():
        raise UserError(f"{run} does not exist", "give a run folder or one of its checkpoints")
    folders = [run] if is_one else [step_folder(run, step) for step in run_steps(run)]
    results: list[dict[str, Any]] = []
    for folder in folders:
        result: dict[str, Any] = {"folder": str(folder), "bytes": None, "problem": None}
        try:
            result["bytes"] = verify_checkpoint(folder)
        except DamageError as error:
            result["problem"] = str(error)
        results.append(result)
        if not as_json:
            whole = f"whole, {bytes_text(result['bytes'])} read" if not result["problem"] else ""
            print(f"{folder.name}: {whole or 'damaged, ' + result['problem']}")
    if as_json:
        answer({"run": str(run), "checkpoints": results})
    bad = [result for result in results if result["problem"]]
    if bad:
        what = f"{len(bad)} of {len(results)} checkpoints are" if len(results) > 1 else "the checkpoint is"
        complain(f"{what} damaged: {bad[0]['folder']}: {bad[0]['problem']}")
    return 1 if bad else 0


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(help="A run folder or a checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    step: Step = "last",
    as_json: opt.Json = False,
) -> int:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them; exit 1 when they differ."""
    from lockstep.checkpoint.disk.diff import compare
    from lockstep.checkpoint.disk.format import shown
    from lockstep.checkpoint.disk.pick import pick

    one, other = pick(a, step), pick(b, step)
    found = compare(one, other)
    differing = [row for row in found if row.what != "equal"]
    if as_json:
        rows = [row._asdict() for row in found]
        answer({"a": str(one.folder), "b": str(other.folder), "tensors": rows})
        return 1 if differing else 0
    terminal = open_terminal()
    if differing:
        table = plain_table("tensor", "", "largest", "relative")
        for row in differing:
            numbers = ["" if number is None else f"{number:.3g}" for number in (row.largest, row.relative)]
            table.add_row(shown(row.name), row.what, *numbers)
        terminal.print(table)
    terminal.print(f"{len(found) - len(differing)} of {len(found)} tensors are equal, {len(differing)} differ")
    for text in _other_differences(one.index, other.index):
        terminal.print(text, markup=False)
    return 1 if differing else 0


@app.command("export")
def export_command(
    run: opt.Run,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="NAME.safetensors, NAME.pt, or a folder for shards with an index.")
    ],
    step: Step = "best",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="The optimizer's state too (.pt only).")] = False,
    shard_size: Annotated[str, typer.Option(help="Largest shard of a folder: 500MB, 5GB.")] = "5GB",
    as_json: opt.Json = False,
) -> int:
    """Write the whole model to one file, or to shards with an index, without a GPU; needs memory for one tensor."""
    from lockstep.checkpoint.disk.pick import pick

    checkpoint = pick(run, step)
    shard_bytes = opt.parse_size(shard_size)
    from lockstep.checkpoint.disk.format import DamageError
    from lockstep.checkpoint.exchange.export import export

    try:
        files = export(checkpoint, output, optimizer=optimizer, shard_bytes=shard_bytes)
    except DamageError as error:
        complain(f"{checkpoint.folder} is damaged: {error}; nothing was exported")
        return 1
    total = sum(path.stat().st_size for path in files)
    if as_json:
        answer({"checkpoint": str(checkpoint.folder), "files": [str(path) for path in files], "bytes": total})
    else:
        what = output if len(files) == 1 else f"{len(files)} files in {output}"
        tensors = f"{len(checkpoint.index.state_dict)} tensors, {bytes_text(total)}"
        print(f"{checkpoint.folder.name} of {run}: {tensors}: {what}")
    return 0


@app.command("import")
def import_command(
    source: Annotated[
        Path, typer.Argument(help="A .safetensors or .pt file, or a folder of shards or of torch's DCP.")
    ],
    run: Annotated[Path, typer.Argument(help="The folder of a new run, which begins with these weights.")],
    dtype: Annotated[str | None, typer.Option(help="Store floating-point weights as fp32, bf16 or fp16.")] = None,
    as_json: opt.Json = False,
) -> int:
    """Make weights from elsewhere the start of a run; nothing in their files is executed."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}", f"choose one of {', '.join(DTYPES)}")
    import torch

    from lockstep.checkpoint.disk.format import shown
    from lockstep.checkpoint.exchange.foreign import import_weights

    kinds = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
    folder, foreign = import_weights(source, run, kinds[dtype] if dtype else None)
    if as_json:
        answer({"checkpoint": str(folder), "tensors": list(foreign.shapes), "left_out": foreign.left_out})
        return 0
    print(f"{len(foreign.shapes)} tensors of {source} are now {folder}")
    if foreign.left_out:
        more = f" and {len(foreign.left_out) - 8} more" if len(foreign.left_out) > 8 else ""
        print(f"left out: {', '.join(map(shown, foreign.left_out[:8]))}{more}")
    there = f"--run-dir {shlex.quote(str(run))}"
    print(f"begin with it: lockstep train RECIPE {there}, or lockstep run {there} SCRIPT")
    return 0


def _other_differences(a: Index, b: Index) -> list[str]:
    """What else than tensors differs between two checkpoints."""
    pairs = [(what, getattr(a, what), getattr(b, what)) for what in ("step", "layout", "versions")]
    texts = [f"{what}: {one} and {other}" for what, one, other in pairs if one != other]
    if a.training and b.training:
        for name in a.training.loaders.keys() & b.training.loaders.keys():
            one, other = a.training.loaders[name].position, b.training.loaders[name].position
            if one != other:
                texts.append(f"position of {name} (epoch, samples): {one} and {other}")
    return texts
