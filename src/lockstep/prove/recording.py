"""What `lockstep verify` has a run write down, so that two runs can be compared number by number.

    FOLDER/rank-0.jsonl                 one line about the model and the rank, then one line a step
    FOLDER/rank-0-step-2.safetensors    value/NAME after the step, grad/NAME as the optimizer saw it; step 0: the start

Of ranks that hold equal parameters one writes them whole, and the others a checksum of every value.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.config.checked import flatten
from lockstep.config.schema import NumericsConfig, RecoverConfig, SetupConfig
from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.follow.trees import tensors_of
from lockstep.follow.values import is_fake
from lockstep.layout import Layout
from lockstep.parallel.build.materialise import checksum, tied_names
from lockstep.parallel.tensor.cut import whole_of
from lockstep.prove.each_rank import each_rank_in_turn
from lockstep.runtime.torch_private import in_backward

if TYPE_CHECKING:
    from lockstep.data.loader import Loader, MicroBatch, StepBatch
    from lockstep.engine import Engine, StepResult

PLAN = "plan.json"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class VerifySettings:
    """What `lockstep verify` tells the runs it launches.

    `layout` is the one in question, also for the runs on one process. `micro_batch` has another size for some loaders
    than they would choose, and `shaken` starts with the last bit of every weight changed, to see what rounding does.
    `blocks` says how many blocks of every list stay. With `explain` one process says how the model would be cut for
    the layout, and nothing is recorded.
    """

    folder: str
    layout: str
    steps: int
    micro_batch: Mapping[str, int] = field(default_factory=dict)
    shaken: bool = False
    blocks: int | None = None
    explain: bool = False


class Recorder:
    """Writes down the first steps of a run, on every rank."""

    def __init__(self, settings: VerifySettings, layout: Layout, rank: int) -> None:
        self.settings = settings
        self._layout = layout
        self._rank = rank
        self._lines = Path(settings.folder) / f"rank-{rank}.jsonl"
        axes = layout.coordinate(rank)
        self._writes_tensors = all(axes[axis] == 0 for axis in axes if axis != "pp")
        self._changed: dict[str, list[Any]] = {}
        self._blocks_built = 0
        self._micro_batches: dict[str, int] = {}
        self._fixed: dict[str, str] = {}
        self._engine: Engine | None = None
        self._returned: list[tuple[str, list[torch.Tensor]]] = []
        self._part: tuple[int, int] = (0, 0)
        self._outputs: dict[str, dict[str, float]] = {}
        self._hooks: list[Any] = []
        # Threads split sums: with as many as a rank has, one process rounds more nearly alike.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // Layout.parse(settings.layout).world_size))

    def plain_numbers(self, settings: SetupConfig) -> SetupConfig:
        """The same settings with values under which layouts can be compared; notes what it changes.

        Rounding to half precision hides errors, and compiled code rounds in its own way. What is proved is compared,
        and its first difference named: a check in between would only stop it.
        """
        plain = settings.model_copy(update={"precision": "fp32", "numerics": NumericsConfig(), "compile": "off"})
        asked, instead = dict(flatten(settings.model_dump())), dict(flatten(plain.model_dump()))
        self._changed = {key: [value, instead[key]] for key, value in asked.items() if value != instead[key]}
        return plain.model_copy(update={"recover": RecoverConfig(check_every=0)})

    def explain(self, plan: dict[str, Any]) -> None:
        """Leave the plan of the model where the command finds it."""
        (Path(self.settings.folder) / PLAN).write_text(json.dumps(plan), encoding="utf-8")

    def with_fewer_blocks(self, build_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """The same model with only the blocks that are to stay."""

        def build() -> nn.Module:
            model = build_model()
            self._blocks_built = len(find_blocks(model))
            if self.settings.blocks is not None:
                keep_blocks(model, self.settings.blocks)
            return model

        return build

    def micro_batch(self, loader: str, asked: int | None) -> int | None:
        """The micro-batch size of a loader: what the script asks for, or what is to be tried instead of its choice."""
        if asked is not None:
            self._fixed[loader] = "given"
        return self.settings.micro_batch.get(loader, asked)

    def begin(self, engine: Engine) -> None:
        """Before the first step: what the model is and where it starts. All ranks call it."""
        self._engine = engine
        self._watch_outputs(engine)
        if self.settings.shaken:
            _shake(engine)
        checksums = self._write_tensors(engine, 0)
        self._lines.write_text("")
        self._write_line(
            rank=self._rank,
            layout=str(self._layout),
            data_rank=self._layout.data_rank(self._rank),
            writes_tensors=self._writes_tensors,
            parameters={name: list(parameter.shape) for name, parameter in engine.stored},
            buffers=[name for name, _ in _float_buffers(engine)],
            names=[name for name, _ in engine.model.named_parameters(remove_duplicate=False)],
            tied=tied_names(engine.model),
            blocks=engine.cut.blocks,
            blocks_built=self._blocks_built,
            changed=self._changed,
            shaken=self.settings.shaken,
            checksums=checksums,
        )

    def step(self, result: StepResult, batch: StepBatch, loader: Loader) -> bool:
        """After a step: its numbers. All ranks call it; says whether this was the last one to record."""
        assert self._engine is not None
        self._write_outputs()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._engine.forwards.begins = lambda _: None
        self._micro_batches[loader.name] = loader.order.micro_batch
        if loader.is_coupled:
            self._fixed.setdefault(loader.name, "coupled")
        is_last = result.step >= self.settings.steps
        self._write_line(
            step=result.step,
            loss=result.loss,
            weight=result.weight,
            grad_norm=float(result.grad_norm),
            lr=result.lr,
            skipped=result.skipped,
            ids=batch.ids,
            outputs=self._outputs if result.step == 1 else {},
            micro_batch=self._micro_batches,
            fixed=self._fixed,
            checksums=self._write_tensors(self._engine, result.step, skipped=result.skipped),
            by_rank=self._by_rank(batch, loader) if is_last else [],
        )
        return is_last

    def _by_rank(self, batch: StepBatch, loader: Loader) -> list[dict[str, Any]]:
        """What each data rank computes for the same samples: the last thing that the engine does."""
        assert self._engine is not None
        if self._layout.data_size == 1:
            return []
        return [asdict(one) for one in each_rank_in_turn(self._engine, batch, loader)]

    def _watch_outputs(self, engine: Engine) -> None:
        """In the first step, write down what every module returns.

        Nothing is computed while a forward runs: a pipeline and a cut tensor follow every operation in it.
        """

        def begin(micro_batch: MicroBatch) -> None:
            self._write_outputs()
            self._part = (-1, 0) if micro_batch.filler else (micro_batch.first, len(micro_batch.ids))

        def keep(name: str, output: Any) -> None:
            if not in_backward() and torch.is_grad_enabled():
                self._returned.append((name, list(tensors_of(output))))

        engine.forwards.begins = begin
        for model in engine.cut.models:
            for name, module in model.named_modules():
                hook = module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
                self._hooks.append(hook)

    @torch.no_grad()
    def _write_outputs(self) -> None:
        """Between two forwards: the norms of what the modules returned in the last one, by places of samples.

        What cannot be told apart by samples has one norm for all of them.
        """
        returned, self._returned = self._returned, []
        first, samples = self._part
        calls: Counter[str] = Counter()
        for name, tensors in returned:
            tensor = next((one for one in tensors if one.is_floating_point()), None)
            if tensor is None or is_fake(tensor) or tensor.numel() == 0:
                continue
            whole = whole_of(tensor.detach())  # with the other ranks that have parts of it
            if first < 0:
                continue
            by_sample = whole.dim() > 0 and len(whole) % samples == 0
            rows = whole.double().reshape(samples if by_sample else 1, -1)
            # Weighted: numbers in another order have the same norm.
            norms = torch.linalg.vector_norm(rows * torch.linspace(1, 2, rows.shape[1], device=rows.device), dim=1)
            found = self._outputs.setdefault(f"{name}/{calls[name]}", {})
            keys = map(str, range(first, first + samples)) if by_sample else [f"{first} to {first + samples - 1}"]
            found.update(zip(keys, norms.tolist(), strict=True))
            calls[name] += 1

    @torch.no_grad()
    def _write_tensors(self, engine: Engine, step: int, skipped: bool = False) -> dict[str, int]:
        """Write whole values and gradients where this rank is the one to do so; returns checksums of the values."""
        engine.state.rest()
        # At zero1 the engine stores rows of what the model computes with: the latter shows a gathering that failed.
        # Under tp the model has parts of what the engine stores.
        with engine.state.hidden():
            used = {name: parameter for model in engine.cut.models for name, parameter in model.named_parameters()}
        used = {name: p for name, p in used.items() if not is_fake(p) and engine.layout.tp == 1}
        tensors: Tensors = {}
        checksums = {}
        for name, parameter in engine.stored:
            value = _host(engine.whole(name, used.get(name, parameter)))
            found = None if step == 0 or skipped else parameter.grad
            gradient = None if found is None else _host(engine.whole(name, found))
            checksums[name] = checksum(value)
            if self._writes_tensors:
                tensors[f"value/{name}"] = value
                if gradient is not None:
                    tensors[f"grad/{name}"] = gradient
        for name, buffer in _float_buffers(engine):
            tensors[f"value/{name}"] = _host(buffer)
            checksums[name] = checksum(tensors[f"value/{name}"])
        if self._writes_tensors:
            save_file(tensors, _tensor_file(self._lines.parent, self._rank, step))
        return checksums

    def _write_line(self, **values: Any) -> None:
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


@torch.no_grad()
def _shake(engine: Engine) -> None:
    """Change every weight by its last bit, up or down: how far rounding takes this training apart shows after it."""
    draw = torch.Generator().manual_seed(0)
    for _, parameter in engine.stored:
        if parameter.is_floating_point():
            way = torch.randint(2, parameter.shape, generator=draw).to(parameter) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, way * torch.inf))


def keep_blocks(model: nn.Module, count: int) -> None:
    """Leave the first `count` of every list of repeated blocks in a model."""
    names = [name for name, _ in find_blocks(model)]
    for owner, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        blocks = model.get_submodule(owner)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        surplus = [name.rpartition(".")[2] for name in group][count:]
        if isinstance(blocks, nn.ModuleDict):
            for key in surplus:
                del blocks[key]
        elif surplus:
            del blocks[count:]


@dataclass(frozen=True)
class Recording:
    """What all ranks of one run wrote down. `steps` has a list of all ranks' lines for every step."""

    folder: Path
    ranks: list[dict[str, Any]]
    steps: list[list[dict[str, Any]]]

    @cached_property
    def parameters(self) -> dict[str, list[int]]:
        """The shapes of all parameters that some rank holds, in the model's order."""
        return {name: shape for rank in self.ranks for name, shape in rank["parameters"].items()}

    @property
    def buffers(self) -> list[str]:
        """The names of all buffers with numbers in them."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank["buffers"]))

    @property
    def blocks(self) -> list[str]:
        """The names of the repeated layers."""
        return list(dict.fromkeys(block for rank in self.ranks for block in rank["blocks"]))

    @property
    def micro_batch(self) -> dict[str, int]:
        """The micro-batch size of every loader that was used."""
        return dict(self.steps[-1][0]["micro_batch"]) if self.steps else {}

    @property
    def shaken(self) -> bool:
        """Whether it began with other last bits."""
        return bool(self.ranks[0]["shaken"])

    @property
    def fixed(self) -> dict[str, str]:
        """The loaders whose micro-batch is part of the training, and why: given by the script, or coupled samples."""
        return dict(self.steps[-1][0]["fixed"]) if self.steps else {}

    @cached_property
    def outputs(self) -> dict[str, dict[str, float]]:
        """What the modules returned in the first step, of all ranks; see `Recorder`."""
        found: dict[str, dict[str, float]] = {}
        for line in self.steps[0] if self.steps else []:
            for call, norms in line.get("outputs", {}).items():
                found.setdefault(call, {}).update(norms)
        return found

    def values(self, step: int) -> Tensors:
        """All parameters and buffers after a step, 0: at the start."""
        return dict(self._read("value/", step))

    def gradients(self, step: int) -> Tensors:
        """The gradients of a step, of the parameters that have one."""
        return dict(self._read("grad/", step))

    def checksums(self, step: int) -> Iterator[tuple[str, int, int]]:
        """(parameter, rank, checksum of its value after a step) for every rank that holds it."""
        lines = self.steps[step - 1] if step else self.ranks
        for rank, line in enumerate(lines):
            for name, value in line["checksums"].items():
                yield name, rank, value

    def _read(self, kind: str, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for rank in self.ranks:
            if rank["writes_tensors"]:
                tensors = load_file(_tensor_file(self.folder, rank["rank"], step))
                yield from ((key.removeprefix(kind), value) for key, value in tensors.items() if key.startswith(kind))


def read_recording(folder: Path) -> Recording:
    """Read what the ranks of a run wrote; a run that did no step is refused."""
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank-")))
    lines = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    steps = min((len(rank) - 1 for rank in lines), default=0)
    if steps == 0:
        raise UserError(
            "the run did no step",
            "verify needs a script that calls lockstep.init(), run.setup(...) and engine.step(...)",
        )
    return Recording(
        folder, [rank[0] for rank in lines], [[rank[step] for rank in lines] for step in range(1, steps + 1)]
    )


def _float_buffers(engine: Engine) -> list[tuple[str, torch.Tensor]]:
    """Running statistics and the like; others are masks and counters."""
    return [(name, buffer) for name, buffer in engine.buffers if buffer.is_floating_point()]


def _tensor_file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank-{rank}-step-{step}.safetensors"


def _host(whole: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in the memory of the host."""
    whole = whole.detach()
    return (whole.to_dense() if whole.is_sparse else whole).cpu().clone(memory_format=torch.contiguous_format)
