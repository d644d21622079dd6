"""What a tensor-parallel step costs with Lockstep, next to one written by hand with torch's `parallelize_module`.

Two CPU ranks over gloo, fp32, tp=2. All contenders live in the same two processes and take turns of a few steps in
rotating order, so that whatever else the machine does hits all of them. They train one GPT-2 with an untied head from
the same weights on the same batches, with the same fused AdamW and clipping at 1. First their loss curves are compared;
a difference fails the benchmark. What counts is the ratio to torch within a round. A time is that of the slower rank.

Lockstep is given the plain model of `gpt2.py`. By hand, attention is written anew for the heads a rank has, every
matrix is given its style, the loss is computed on logits that stay cut, and parameters that torch cut and those it did
not are clipped and updated apart, because torch does not mix them. "torch" has three matrices for queries, keys and
values, as torch's tutorial does; "torch fused" has one, as the plain model does, whose rows were put in order by hand.

Processor time is reported beside it: what the two processes made the cores do, waiting left out. It hardly depends on
what else the machine does, so on a busy one it is the figure to look at.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt2 import GPT2, INITIAL_STD, Attention, Shape, Size, Tokens
from measuring import (
    FOLDER,
    OwnGarbageSetting,
    Say,
    in_turn,
    largest_difference,
    machine_text,
    options_of,
    past_the_console,
    ratio_cells,
    start_ranks,
    summary,
    take_another_model,
    turn,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader

import lockstep
from lockstep.run import Run

RANKS = 2
SEED = 0
LEARNING_RATE = 3e-4
CLIP = 1.0
LARGEST_DIFFERENCE = 1e-5
COMPARED_STEPS = 6
TARGETS = {"eager": 1.2, "compiled": 1.05}
"""The largest ratio to what is written by hand that is good enough."""

SIZES = {
    "tiny": Size(Shape(layers=2, width=64, heads=4, context=32, vocabulary=1024), batch=4, block=1),
    "small": Size(Shape(layers=4, width=256, heads=8, context=128, vocabulary=4096), batch=8, block=2),
}

Batch = dict[str, Tensor]
Losses = Generator[float | Tensor]


@dataclass(frozen=True)
class Problem:
    """What is trained, and how."""

    weights: GPT2
    size: Size
    steps: int
    compiled: bool

    def dataset(self) -> Tokens:
        return Tokens(self.size.shape, self.steps * self.size.batch, SEED)

    def build_model(self) -> GPT2:
        return copy.deepcopy(self.weights)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


Contender = Callable[[Problem, Run], Losses]


def untied(shape: Shape) -> GPT2:
    """GPT-2 whose head has a matrix of its own."""
    model = GPT2(shape)
    model.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
    nn.init.normal_(model.head.weight, std=INITIAL_STD)
    return model


class LocalAttention(nn.Module):
    """Attention with as many heads as its matrices return, which on a rank is some of them."""

    def __init__(self, plain: Attention) -> None:
        super().__init__()
        self.head_width = plain.out.in_features // plain.heads
        self.out = plain.out

    def parts(self, x: Tensor) -> Iterable[Tensor]:
        """Queries, keys and values."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(*x.shape[:2], -1, self.head_width).transpose(1, 2) for part in self.parts(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class ThreeMatrices(LocalAttention):
    """Queries, keys and values from one matrix each, as torch's tutorial has them."""

    def __init__(self, plain: Attention) -> None:
        super().__init__(plain)
        width = plain.out.in_features
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        weights, biases = plain.qkv.weight.chunk(3), plain.qkv.bias.chunk(3)
        with torch.no_grad():
            for matrix, weight, bias in zip((self.query, self.key, self.value), weights, biases, strict=True):
                matrix.weight.copy_(weight)
                matrix.bias.copy_(bias)

    def parts(self, x: Tensor) -> Iterable[Tensor]:
        return [matrix(x) for matrix in (self.query, self.key, self.value)]


class OneMatrix(LocalAttention):
    """The one matrix of the plain model, its rows in another order: each rank has the three parts of its own heads."""

    def __init__(self, plain: Attention) -> None:
        super().__init__(plain)
        self.qkv = plain.qkv
        with torch.no_grad():
            for parameter in self.qkv.parameters():
                by_rank = parameter.view(3, RANKS, -1, *parameter.shape[1:]).transpose(0, 1)
                parameter.copy_(by_rank.flatten(0, 2).clone())

    def parts(self, x: Tensor) -> Iterable[Tensor]:
        joint: Tensor = self.qkv(x)
        return joint.chunk(3, dim=-1)


def cut_by_hand(model: GPT2, attention: type[LocalAttention], compiled: bool) -> None:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    blocks: Iterable[Any] = model.blocks
    for block in blocks:
        block.attention = attention(block.attention)
        plan = {
            # Said once for the matrices that have it in common: else each adds up its own gradient of it.
            "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        others = [name for name, _ in block.attention.named_children() if name != "out"]
        parallelize_module(block, mesh, plan | {f"attention.{name}": ColwiseParallel() for name in others})
        if compiled:
            block.compile()
    around = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, around)


def by_hand(attention: type[LocalAttention], problem: Problem, _: Run) -> Losses:
    """torch's own tensor parallelism, as its tutorial shows it, with the cut loss."""
    model = problem.build_model()
    cut_by_hand(model, attention, problem.compiled)
    cut = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    optimizer = problem.optimizer([{"params": cut}, {"params": whole}])
    for batch in DataLoader(problem.dataset(), batch_size=problem.size.batch):
        optimizer.zero_grad()
        with loss_parallel():
            loss = model(batch["x"], batch["y"])
            loss.backward()
        clip_by_hand(cut, whole)
        optimizer.step()
        yield loss.detach().full_tensor()


def clip_by_hand(cut: Sequence[nn.Parameter], whole: Sequence[nn.Parameter]) -> None:
    norm_of_cut = get_total_norm([parameter.grad for parameter in cut if parameter.grad is not None])
    norm_of_whole = get_total_norm([parameter.grad for parameter in whole if parameter.grad is not None])
    assert isinstance(norm_of_cut, DTensor)
    norm = torch.hypot(norm_of_cut.full_tensor(), norm_of_whole)
    clip_grads_with_norm_(cut, CLIP, norm)
    clip_grads_with_norm_(whole, CLIP, norm)


def with_lockstep(problem: Problem, run: Run) -> Losses:
    """Lockstep at engine level; its event log and TensorBoard file are on, as by default."""

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return model(batch["x"], batch["y"], reduction="sum"), batch["y"].numel()

    name = take_another_model(run)
    engine = run.setup(
        problem.build_model,
        loss,
        optimizer=problem.optimizer,
        clip=CLIP,
        compile="blocks" if problem.compiled else "off",
    )
    batch = problem.size.batch
    loader = run.loader(
        problem.dataset(), batch, micro_batch=batch, steps=problem.steps, shuffle=False, workers=0, name=name
    )
    for step in loader:
        yield engine.step(step).loss


BY_HAND: dict[str, Contender] = {"torch": partial(by_hand, ThreeMatrices), "torch fused": partial(by_hand, OneMatrix)}
CONTENDERS = BY_HAND | {"lockstep": with_lockstep}


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        measure_on_this_rank(options)
    else:
        raise SystemExit(start_ranks(RANKS))


def arguments() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--compile", action="store_true", help="compile the blocks, of both contenders")
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds = "tiny", 2
    return options


def measure_on_this_rank(options: argparse.Namespace) -> None:
    say = past_the_console(Path(os.environ[FOLDER]) / "console.log") if os.environ["RANK"] == "0" else lambda _: None
    say(f"{machine_text()}; torch {torch.__version__}")
    results: dict[str, Any] = {"machine": machine_text(), "ranks": RANKS, "torch": torch.__version__}
    run = lockstep.init(f"tp={RANKS}", run_dir=Path(os.environ[FOLDER]) / "run", device="cpu", seed=SEED)
    results |= measure(options, run, say)
    if options.json and run.is_main:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    run.close()
    wrong = [name for name, far in results["largest_difference"].items() if not far < LARGEST_DIFFERENCE]
    for name in wrong:
        say(f"the loss curve of {name} differs by {results['largest_difference'][name]:.1e}")
    raise SystemExit(bool(wrong))


def measure(options: argparse.Namespace, run: Run, say: Say) -> dict[str, Any]:
    """Compare the loss curves, then time the contenders in turns."""
    size = SIZES[options.size]
    mode = "compiled" if options.compile else "eager"
    torch.manual_seed(SEED)
    problem = Problem(
        weights=untied(size.shape),
        size=size,
        steps=COMPARED_STEPS + size.block * options.rounds,
        compiled=options.compile,
    )
    parameters = sum(parameter.numel() for parameter in problem.weights.parameters())
    say(f"\n{options.size}, {mode}: {parameters:,} parameters, {size.batch} x {size.shape.context} tokens")
    garbage = OwnGarbageSetting()
    loops = {name: contender(problem, run) for name, contender in CONTENDERS.items()}
    curves = {}
    for name, loop in loops.items():
        with garbage.of(name):
            curves[name] = turn(loop, COMPARED_STEPS).losses
        difference = largest_difference(curves[name], curves["torch"])
        say(f"  {name}: loss {curves[name][0]:.6f} to {curves[name][-1]:.6f}, at most {difference:.1e} away from torch")

    times: dict[str, list[float]] = {name: [] for name in loops}
    processor: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(options.rounds):
        for name in in_turn(list(loops), number):
            with garbage.of(name):
                done = turn(loops[name], size.block)
            times[name].append(run.reduce(done.seconds, "max") / size.block * 1e3)
            processor[name].append(run.reduce(done.processor_seconds, "mean") / size.block * 1e3)
        say(f"  round {number + 1}: " + ", ".join(f"{name} {times[name][-1]:.1f}" for name in loops) + " ms")
    for loop in loops.values():
        loop.close()

    summaries = {name: summary(times[name], times["torch"]) for name in loops}
    processor_summaries = {name: summary(processor[name], processor["torch"]) for name in loops}
    for what, shown in (("wall clock", summaries), ("processor", processor_summaries)):
        say(f"| {what} | ms/step | ratio to torch | middle half | all rounds |")
        say("|---|---|---|---|---|")
        for name, one in shown.items():
            say(f"| {name} | {one['median_ms']:.1f} | {ratio_cells(one)} |")
    best = min(BY_HAND, key=lambda name: summaries[name]["median_ms"])
    ratio, target = summary(times["lockstep"], times[best])["ratio"], TARGETS[mode]
    met = ratio <= target
    if not options.quick:
        verdict = "met" if met else "missed"
        say(f"{mode}, at most {target} of the faster one by hand, {best}: {verdict}, with {ratio:.3f}")
    return {
        **asdict(size),
        "size": options.size,
        "mode": mode,
        "parameters": parameters,
        "losses": curves,
        "largest_difference": {name: largest_difference(curves[name], curves["torch"]) for name in loops},
        "contenders": summaries,
        "processor": processor_summaries,
        "target": target,
        "compared_with": best,
        "ratio": ratio,
        "met": met,
    }


if __name__ == "__main__":
    main()
