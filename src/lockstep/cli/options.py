"""Options that mean the same in every command, each declared once, and the layer of config values they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import UserError, nearest

if TYPE_CHECKING:
    from lockstep.config.layers import Layer

Layout = Annotated[str | None, typer.Option(help="Mesh axes, such as dp=2,fsdp=4; one may be auto.")]
Nodes = Annotated[str | None, typer.Option(help="Nodes of the run, 2 or 3:4 (at least 3); start it on each of them.")]
NodeRank = Annotated[int | None, typer.Option(help="Which node this is; node 0 is the head.")]
Head = Annotated[str | None, typer.Option(help="HOST:PORT of the head node, where the others find it.")]
Restarts = Annotated[int | None, typer.Option(help="Failures in a row, without a checkpoint between, to try again.")]
OnOom = Annotated[str | None, typer.Option(help="Out of memory: shrink the micro-batch and go on, or stop.")]
MaxTime = Annotated[str | None, typer.Option(help="Save and stop before this is over: 2h, 90m, 1-12:00:00.")]
Nproc = Annotated[int | None, typer.Option(help="Processes on this node. Default: one a GPU, or 2 on CPUs.")]
ShareGpu = Annotated[bool | None, typer.Option("--share-gpu", help="Let several ranks use one GPU, over gloo.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One config value: a.b=c. May be repeated.")]
Name = Annotated[str | None, typer.Option(help="The run's name under runs/. An unfinished one is continued.")]
RunDir = Annotated[Path | None, typer.Option(help="The run folder itself, instead of a name.")]
Resume = Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint.")]
Accept = Annotated[
    list[str] | None, typer.Option(help="Go on although: changed-script, the code is another one. May be repeated.")
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps to do in all.")]
Profile = Annotated[str | None, typer.Option(metavar="STEPS", help="Record a trace of these steps: 10-12, or 10.")]
ProfileRanks = Annotated[str | None, typer.Option(help="Ranks that record it: 0,3, or all. Default: rank 0.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda when there is a GPU.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, text for people on stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Resolve, check and print; start nothing, write nothing.")]
Recipe = Annotated[str | None, typer.Argument(metavar="[RECIPE | config.toml]", help="Default: the recipe lm.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; several are compared.")]
Run = Annotated[Path, typer.Argument(help="A run folder, or one of its checkpoints.")]

_LAUNCH: dict[str, Any] = {"layout": Layout, "nproc": Nproc, "nodes": Nodes, "node_rank": NodeRank, "head": Head}
_LAUNCH |= {"restarts": Restarts, "on_oom": OnOom, "max_time": MaxTime, "steps": Steps, "profile": Profile}
_LAUNCH |= {"profile_ranks": ProfileRanks, "set_": Set, "name": Name, "run_dir": RunDir, "resume": Resume}
_LAUNCH |= {"accept": Accept, "device": Device, "share_gpu": ShareGpu, "dry_run": DryRun, "as_json": Json}
"""What `train` and `run` take, in the order of their help."""
_DEFAULTS = {"resume": "auto", "dry_run": False, "as_json": False}
_SETTINGS = ["layout", "nproc", "steps", "name", "device", "share_gpu", "restarts", "on_oom", "max_time"]
_SETTINGS += ["profile", "profile_ranks"]
"""Those of them that are values of the config."""


def takes_launch_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of every launch, as `**launch`; its own keyword-only ones stand after them."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    first, last = ([one for one in own if one.kind is kind] for kind in (own[0].kind, inspect.Parameter.KEYWORD_ONLY))
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=option)
        for name, option in _LAUNCH.items()
    ]
    vars(command)["__signature__"] = inspect.Signature([*first, *shared, *last])
    return command


def settings_in(launch: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """The values of the config among the options of a launch that the user really gave."""
    return given(**{key: launch[key] for key in _SETTINGS if key not in left_out})


def given(**options: Any) -> dict[str, Any]:
    """The options the user really gave."""
    return {key: value for key, value in options.items() if value is not None}


def config_layers(what: str | None, told: dict[str, Any], assigned: list[str]) -> list[Layer]:
    """What a user says of a training: by naming a recipe or a TOML file, by options, and by `--set`."""
    from lockstep.config.layers import Layer, parse_assignments

    return [*named_layer(what), Layer("the command line", told), Layer("--set", parse_assignments(assigned))]


def named_layer(what: str | None) -> list[Layer]:
    """The config values that naming a recipe or a TOML file gives."""
    from lockstep.config.layers import Layer
    from lockstep.config.toml import read_toml
    from lockstep.record.folder import name_after

    if what is None:
        return []
    if what.endswith(".toml"):
        return [Layer(what, {"name": name_after(Path(what)), **read_toml(Path(what))})]
    return [Layer("the command line", {"recipe": what})]


def find_run(run: Path) -> Path:
    """The folder of a run, which may have no events yet; else a sentence with the nearest one that is there."""
    from lockstep.record.folder import CONFIG, EVENTS, JOB_SCRIPT

    def is_run(path: Path) -> bool:
        return any((path / name).exists() for name in (EVENTS, CONFIG, JOB_SCRIPT))

    if is_run(run):
        return run
    if run.exists():
        raise UserError(f"{run} is not a run folder (it has no {EVENTS})", "give a folder such as runs/lm")
    places = dict.fromkeys((run.parent, Path("runs")))
    known = {path.name: path for place in places if place.is_dir() for path in place.iterdir() if is_run(path)}
    close = nearest(run.name, known)
    some = (
        f"there {'is' if len(known) == 1 else 'are'} {', '.join(map(str, sorted(known.values())[:10]))}"
        if known
        else "give a folder such as runs/lm"
    )
    raise UserError(f"there is no run {run}", f"did you mean {known[close]}?" if close else some)


def parse_size(text: str) -> int:
    """A number of bytes that a user wrote, as in 500MB."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    try:
        count = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count <= 0:
        raise UserError(f"{text!r} is not a size", "write 500MB or 5GB")
    return count


def processes(nproc: int | None, device: str, share_gpu: bool) -> tuple[int, str, str | None]:
    """How many processes to start, on which device, and one line when GPUs are visible but unused."""
    from lockstep.runtime.device import visible_gpus

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device} is not a device", "use cpu or cuda")
    gpus = visible_gpus()
    if device == "cuda" and gpus == 0:
        raise UserError(
            "--device cuda was asked for but no GPU is visible", "use --device cpu, or check CUDA_VISIBLE_DEVICES"
        )
    chosen = "cuda" if gpus and device != "cpu" else "cpu"
    count = nproc or (gpus if chosen == "cuda" else 2)
    if chosen == "cuda" and count > gpus and not share_gpu:
        raise UserError(
            f"--nproc {count} but {gpus} visible GPU{'s' if gpus > 1 else ''}",
            f"use --nproc {gpus}, or --share-gpu to let ranks share them, or --device cpu",
        )
    used = min(count, gpus) if chosen == "cuda" else 0
    unused = None
    if used < gpus:
        unused = f"{gpus} GPU{'s are' if gpus > 1 else ' is'} visible and {used or 'none'} used: "
        unused += f"--nproc {gpus} uses all" if chosen == "cuda" else "leave --device cpu out to use GPUs"
    return count, chosen, unused
