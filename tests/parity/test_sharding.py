"""The levels of sharding, their units and number formats: the numbers of one process, and only what was promised kept.

A plan is what is trained and how it is sharded. Every plan is trained on every layout, all of a layout's plans in one
go, and compared with one process that sees the same logical micro-batches in the same number formats. The quick half
has every plan on two shards, and every level on all layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.config.layers import Layer, resolve
from lockstep.config.schema import Format, ShardConfig
from lockstep.engine import Engine
from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.layout import Layout
from lockstep.parallel.replicate.shard import sharding_units
from lockstep.record.folder import RunFolder, check_same_training, write_config
from tests.marks import others_slow
from tests.parity.problems import (
    GLOBAL_BATCH,
    VOCABULARY,
    WIDTH,
    RaggedTexts,
    Tensors,
    TinyGPT,
    adamw,
    anew,
    disagreeing_gradients,
    error_of,
    fingerprint,
    gradients,
    join,
    text_loss,
    weights,
)
from tests.ranks import Job, RankFailed, RankPool

STEPS = 4


class Awkward(nn.Module):
    """A tied GPT with what sharding gets wrong: fewer rows than ranks, a frozen part, a part that nothing uses."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.gpt = TinyGPT(tied=True, dropout=dropout)
        self.gpt.blocks[0].get_submodule("mlp").requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(2, VOCABULARY))
        self.unused = nn.Linear(5, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens) * self.gain + self.shift.sum(0)  # type: ignore[no-any-return]


FROZEN = "gpt.blocks.0.mlp."
UNUSED = "unused."


class Plain(nn.Module):
    """Nothing repeats, and nothing is called without its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.out(x + self.middle(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Plan:
    shard: dict[str, Any]
    build: Callable[[], nn.Module] = Awkward
    numerics: dict[str, Any] = field(default_factory=dict)
    precision: Format = "fp32"
    fused: bool = False
    recompute: bool = False

    @property
    def in_one_process(self) -> Plan:
        """What it has to agree with."""
        kept = {key: value for key, value in self.numerics.items() if key != "reduce_dtype"}
        return Plan({}, self.build, kept, self.precision)


ROUNDED = {"param_dtype": "bf16"}
BF16_SUMS = {"reduce_dtype": "bf16"}

PLANS = {
    "zero1": Plan({"level": "zero1"}),
    "zero1 fused": Plan({"level": "zero1"}, fused=True),
    "zero1 recompute": Plan({"level": "zero1"}, recompute=True),
    "zero2": Plan({"level": "zero2"}),
    "zero2 recompute": Plan({"level": "zero2"}, recompute=True),
    "zero3": Plan({"level": "zero3"}, fused=True),
    "zero2 by size": Plan({"level": "zero2", "units": "size", "min_params": 600}),
    "zero3 by size": Plan({"level": "zero3", "min_params": 400}, Plain),
    "zero1 rounded": Plan({"level": "zero1"}, numerics=ROUNDED, precision="bf16", recompute=True),
    "zero2 rounded": Plan({"level": "zero2"}, numerics=ROUNDED, precision="bf16"),
    "zero3 rounded": Plan({"level": "zero3"}, numerics=ROUNDED, precision="bf16", recompute=True),
    "zero1 bf16 sums": Plan({"level": "zero1"}, numerics=BF16_SUMS),
    "zero2 bf16 sums": Plan({"level": "zero2"}, numerics=BF16_SUMS),
    "zero3 bf16 sums": Plan({"level": "zero3"}, numerics=BF16_SUMS),
}
LAYOUTS = {"fsdp=2": 2, "fsdp=3": 1, "dp=2,fsdp=2": 1}
"""Each with its micro-batch: every one accumulates, and with three ranks some have a filler."""

CELLS = [
    *(("fsdp=2", name) for name in PLANS),
    *(("fsdp=3", name) for name in PLANS if "recompute" not in name),
    *(("dp=2,fsdp=2", name) for name in PLANS if PLANS[name].shard["level"] != "zero2" or name == "zero2"),
    *(("dp=2", name) for name in ("zero1 rounded", "zero1 bf16 sums")),
]
QUICK = [(layout, name) for layout, name in CELLS if layout in ("fsdp=2", "dp=2")]
each_cell = pytest.mark.parametrize(("layout", "name"), others_slow(CELLS, QUICK))


def is_rough(plan: Plan) -> bool:
    return "bf16" in (plan.precision, plan.numerics.get("reduce_dtype"))


# ---- What runs in a rank


@dataclass
class Record:
    losses: list[float]
    norms: list[float]
    gradients: list[Tensors]
    initial: Tensors
    final: Tensors
    fingerprint: str
    facts: dict[str, Any]


def by_dimension(plan: Plan, parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, told apart as people do."""
    matrices = [(name, p) for name, p in parameters if p.ndim >= 2]
    others = [(name, p) for name, p in parameters if p.ndim < 2]
    assert {name for name, _ in others if name.startswith("gpt.norm")} <= {"gpt.norm.weight", "gpt.norm.bias"}
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return adamw(groups, **({"fused": True} if plan.fused else {"foreach": True}))


def train(job: Job, layout: str, micro_batch: int, plans: list[Plan]) -> list[Record]:
    with join(job, layout) as run:
        records = []
        for plan in plans:
            engine = anew(run).setup(
                plan.build,
                text_loss,
                optimizer=partial(by_dimension, plan),
                clip=0.5,
                precision=plan.precision,
                numerics=plan.numerics,
                shard=plan.shard,
                recompute=plan.recompute,
            )
            loader = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=micro_batch, steps=STEPS, workers=0)
            seen = Record([], [], [], weights(engine), {}, "", {})
            for batch in loader:
                out = engine.step(batch)
                seen.losses.append(out.loss)
                seen.norms.append(out.grad_norm.item())
                if out.step <= 2:
                    seen.gradients.append(gradients(engine))
                if out.step == 2:
                    run.evaluate(RaggedTexts(5))
            seen.final = weights(engine)
            seen.fingerprint = fingerprint(seen.final)
            seen.facts = facts(engine)
            if job.rank != 0:
                seen.gradients, seen.initial, seen.final = [], {}, {}
            records.append(seen)
    return records


def whole_ones(engine: Engine) -> list[str]:
    with engine.state.hidden():
        return [name for name, parameter in engine.model.named_parameters() if not isinstance(parameter, DTensor)]


def facts(engine: Engine) -> dict[str, Any]:
    """What this rank holds between steps, and while it computes."""
    state = [
        (value.to_local() if isinstance(value, DTensor) else value)
        for slots in engine.optimizer.state.values()
        for value in slots.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    with torch.no_grad(), engine.state.hidden():
        held = [one.to_local() if isinstance(one, DTensor) else one for one in engine.model.parameters()]
        engine.model(RaggedTexts()[0]["x"][None])
        gathered = whole_ones(engine)
    engine.state.rest()
    return {
        "state bytes": sum(value.numel() * value.element_size() for value in state),
        "parameter bytes": sum(value.numel() * value.element_size() for value in held),
        "gathered after a forward": gathered,
        "whole at rest": whole_ones(engine),
        "units": [name for name, module in engine.model.named_modules() if isinstance(module, FSDPModule)],
        "shapes": {name: tuple(parameter.shape) for name, parameter in engine.stored},
        "placements": {str(p.placements) if isinstance(p, DTensor) else "whole" for _, p in engine.stored},
    }


class Table:
    """Trains a layout when its first plan is asked for, and the one-process references of a micro-batch likewise.

    The quick ones apart, since most sessions do not ask for the others.
    """

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._cells: dict[tuple[str, str], list[Record] | BaseException] = {}
        self._references: dict[int, dict[str, Record]] = {}

    def records(self, layout: str, name: str) -> list[Record]:
        if (layout, name) not in self._cells:
            is_quick = (layout, name) in QUICK
            self._train([cell for cell in CELLS if cell[0] == layout and (cell in QUICK) == is_quick])
        found = self._cells[layout, name]
        if isinstance(found, BaseException):
            raise found
        return found

    def _train(self, cells: list[tuple[str, str]]) -> None:
        layout, plans = cells[0][0], [PLANS[name] for _, name in cells]
        size = Layout.parse(layout).world_size
        try:
            by_rank = self._ranks.run(train, size, layout, LAYOUTS.get(layout, 2), plans, timeout=100)
        except AssertionError as error:  # once, not again for every plan
            self._cells |= dict.fromkeys(cells, error)
        else:
            self._cells |= {cell: list(records) for cell, *records in zip(cells, *by_rank, strict=True)}

    def reference(self, layout: str, name: str) -> Record:
        micro_batch = LAYOUTS.get(layout, 2)
        if micro_batch not in self._references:
            different: list[Plan] = []
            for plan in PLANS.values():
                if plan.in_one_process not in different:
                    different.append(plan.in_one_process)
            (found,) = self._ranks.run(train, 1, "single", micro_batch, different, timeout=100)
            self._references[micro_batch] = {
                name: found[different.index(plan.in_one_process)] for name, plan in PLANS.items()
            }
        return self._references[micro_batch][name]


@pytest.fixture(scope="module")
def table(ranks: RankPool) -> Table:
    return Table(ranks)


# ---- The numbers of one process


@each_cell
def test_it_trains_as_one_process_does(table: Table, layout: str, name: str) -> None:
    first, *others = table.records(layout, name)
    for other in others:
        assert (other.losses, other.norms, other.fingerprint) == (first.losses, first.norms, first.fingerprint)
    expected, rough = table.reference(layout, name), is_rough(PLANS[name])
    assert first.initial.keys() == expected.initial.keys()
    assert all(first.initial[key].equal(expected.initial[key]) for key in expected.initial)
    assert first.losses == pytest.approx(expected.losses, rel=5e-4 if rough else 1e-6)
    assert first.norms == pytest.approx(expected.norms, rel=2e-2 if rough else 1e-5)
    for key, after in expected.final.items():
        moved = (after.double() - expected.initial[key].double()).norm()
        if not key.endswith("key.bias"):  # moved by rounding errors alone
            difference = (first.final[key].double() - after.double()).norm()
            assert difference <= (0.1 if rough else 3e-5) * moved, key


@each_cell
def test_gradients_of_the_first_steps_are_those_of_one_process(table: Table, layout: str, name: str) -> None:
    plan = PLANS[name]
    found, expected = table.records(layout, name)[0], table.reference(layout, name)
    for step, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert ours.keys() == theirs.keys(), "a parameter that nothing uses has no gradient"
        if "reduce_dtype" in plan.numerics:
            whole = torch.stack([grad.norm() for grad in theirs.values()]).norm()
            for key, grad in theirs.items():
                assert (ours[key] - grad).norm() <= 1e-2 * grad.norm() + 1e-6 * whole, key
        elif step == 0 or plan.precision == "fp32":
            assert list(disagreeing_gradients(ours, theirs)) == []


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, ["fsdp=2"]))
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_what_is_frozen_or_unused_stays(table: Table, layout: str, name: str) -> None:
    record = table.records(layout, name)[0]
    stayed = {key for key, start in record.initial.items() if record.final[key].equal(start)}
    buffers = {key for key in record.initial if key.endswith(("causal", "waves"))}
    assert stayed == buffers | {key for key in record.initial if key.startswith((FROZEN, UNUSED))}
    assert not any(key.startswith((FROZEN, UNUSED)) for grads in record.gradients for key in grads)


def test_micro_batches_add_up_in_fp32_whatever_the_sums_travel_in(table: Table) -> None:
    """Two ranks add the same two numbers at every level: a difference would come from before."""
    one, two, three = (table.records("fsdp=2", f"zero{level} bf16 sums")[0].gradients[0] for level in (1, 2, 3))
    for key, grad in one.items():
        assert grad.equal(two[key]), key
        assert grad.equal(three[key]), key
    exact = table.records("fsdp=2", "zero3")[0].gradients[0]
    assert any(not grad.equal(exact[key]) for key, grad in one.items())


# ---- What a rank holds


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, ["fsdp=2"]))
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_every_level_shards_the_optimizer_state(table: Table, layout: str, name: str) -> None:
    shards = Layout.parse(layout).fsdp
    whole = table.reference(layout, name).facts
    ranks = [record.facts for record in table.records(layout, name)]
    together = sum(rank["state bytes"] for rank in ranks) * shards // len(ranks)
    assert together == whole["state bytes"]
    for rank in ranks:
        assert rank["state bytes"] <= 1.1 * whole["state bytes"] / shards + 4096  # rows do not divide
        assert rank["shapes"] == whole["shapes"], "factories see whole shapes"
        assert rank["placements"] == {"(Replicate(), Shard(dim=0))" if layout == "dp=2,fsdp=2" else "(Shard(dim=0),)"}


@pytest.mark.parametrize("layout", others_slow(LAYOUTS, ["fsdp=2"]))
def test_levels_differ_in_what_they_keep_whole(table: Table, layout: str) -> None:
    levels = {name: table.records(layout, name)[0].facts for name in ("zero1", "zero2", "zero3")}
    every = set(levels["zero1"]["shapes"])
    assert set(levels["zero1"]["whole at rest"]) == every
    assert levels["zero2"]["whole at rest"] == levels["zero3"]["whole at rest"] == []
    assert set(levels["zero2"]["gathered after a forward"]) == every
    # The root stays gathered, as torch has it: the backward begins with it.
    assert set(levels["zero3"]["gathered after a forward"]) == {
        key for key in every if not key.startswith("gpt.blocks")
    }
    assert levels["zero2"]["parameter bytes"] < levels["zero1"]["parameter bytes"] / 1.5


# ---- Units


def test_units_by_size_are_used_in_training(table: Table) -> None:
    assert table.records("fsdp=2", "zero3 by size")[0].facts["units"] == [
        "",
        "embedding",
        "middle.0",
        "middle.2",
        "out",
    ]
    assert table.records("fsdp=2", "zero3")[0].facts["units"] == ["", "gpt.blocks.0", "gpt.blocks.1"]


def units(model: nn.Module, **config: Any) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    blocks = [block for _, block in find_blocks(model)]
    return [names[module] for module in sharding_units(model, blocks, ShardConfig(**config))]


class Shared(nn.Module):
    """One layer that stands in two places, beside one that stands in one."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(10, 10)
        self.left = nn.Sequential(shared, nn.Linear(10, 20))
        self.right = nn.Sequential(shared, nn.Linear(10, 20))


class Tied(nn.Module):
    """Weights tied inside a part, and across two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
        self.inside[1].weight = self.inside[0].weight
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight


def test_a_unit_by_size_is_the_smallest_module_that_is_large_enough() -> None:
    model = nn.Sequential(
        nn.Linear(10, 10), nn.Sequential(nn.Linear(3, 3), nn.Linear(10, 10)), nn.ModuleDict({"a": nn.Linear(5, 5)})
    )
    assert units(model, units="size", min_params=110) == ["0", "1.1"]
    assert units(model, units="size", min_params=111) == ["1"]
    assert units(model, units="size", min_params=12) == ["0", "1.0", "1.1", "2.a"]
    assert units(model, units="size", min_params=31) == ["0", "1.1"], "a container is never called"
    assert units(model, units="size", min_params=10_000) == []


def test_what_reads_its_childrens_weights_is_not_taken_apart() -> None:
    assert units(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}), units="size", min_params=10) == ["a"]
    assert units(nn.ModuleDict({"a": nn.TransformerEncoderLayer(8, 2, 16)}), units="size", min_params=10) == ["a"]


def test_a_weight_that_two_parts_use_stays_above_both() -> None:
    assert units(Shared(), units="size", min_params=100) == ["left.0", "left.1", "right.1"], "called in both places"
    assert units(Shared(), units="size", min_params=300) == []
    assert units(Tied(), units="size", min_params=10) == ["inside"]
    assert units(TinyGPT(tied=True), units="size", min_params=400) == [
        *("blocks.0.attention", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.attention", "blocks.1.mlp.0"),
        "blocks.1.mlp.2",
    ]


def test_auto_takes_blocks_where_there_are_any() -> None:
    assert units(TinyGPT(), min_params=10) == ["blocks.0", "blocks.1"]
    assert units(Plain(), min_params=400) == ["embedding", "middle.0", "middle.2", "out"]
    assert units(Plain()) == []
    with pytest.raises(UserError, match=r"no repeated blocks.*size"):
        units(Plain(), units="blocks")


# ---- What cannot be sharded


def transposed() -> nn.Module:
    model = Plain()
    model.out.weight = nn.Parameter(model.out.weight.detach().T.contiguous().T)
    return model


def mixed() -> nn.Module:
    model = Plain()
    model.out.double()
    return model


def refusals(job: Job, layout: str) -> dict[str, str]:
    said = {}
    with join(job, layout) as run:
        for level in ("zero1", "zero3"):
            for name, build in {"transposed": transposed, "mixed": mixed}.items():
                shard = {"level": level, "units": "blocks"} if level == "zero1" else {"level": level}
                again = partial(anew(run).setup, build, text_loss, optimizer=adamw, shard=shard)
                said[f"{level} {name}"] = str(error_of(again))
    return said


def test_what_cannot_be_sharded_is_refused_by_name_at_every_level(ranks: RankPool) -> None:
    for said in ranks.run(refusals, 2, "fsdp=2"):
        for level in ("zero1", "zero3"):
            assert said[f"{level} transposed"].startswith("the parameter out.weight is not stored row by row")
        assert said["zero1 mixed"] == "None", "whole parameters may differ"
        assert said["zero3 mixed"].startswith("the model stores middle.2.bias as float32 and out.bias as float64")


def test_a_level_without_an_fsdp_axis_says_nothing(ranks: RankPool) -> None:
    plan = Plan({"level": "zero2", "units": "blocks"}, Plain)
    (found,) = ranks.run(train, 1, "single", 4, [plan])
    assert len(found[0].losses) == STEPS


# ---- Number formats


class Watching(nn.Module):
    """Notes what its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()
        self.register_buffer("table", torch.full((2,), 1 / 3))
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.seen: dict[str, Any] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        watched = self.gpt.embedding.weight
        self.seen = {
            "dtype": watched.dtype,
            "tied": self.gpt.head.weight is watched,
            "values": watched.detach().float(),
        }
        return self.norm(self.gpt(tokens).flatten(0, 1)).unflatten(0, tokens.shape)  # type: ignore[no-any-return]


def watch(job: Job, layout: str, level: str) -> tuple[dict[str, Any], dict[str, str], Tensors]:
    with join(job, layout) as run:
        engine = run.setup(
            Watching,
            text_loss,
            optimizer=adamw,
            precision="bf16",
            numerics={"param_dtype": "bf16", "buffer_dtype": "bf16"},
            shard={"level": level},
        )
        before = weights(engine)
        (batch,) = run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=1, workers=0)
        engine.step(batch)
        stored = {name: str(tensor.dtype) for name, tensor in [*engine.stored, *engine.model.named_buffers()]}
        return getattr(engine.model, "seen"), stored, before  # noqa: B009


@pytest.mark.parametrize(
    ("layout", "level"), [("single", "zero3"), ("dp=2", "zero3"), *(("fsdp=2", f"zero{n}") for n in (1, 2, 3))]
)
def test_the_forward_sees_rounded_weights_on_any_layout(ranks: RankPool, layout: str, level: str) -> None:
    for seen, stored, before in ranks.run(watch, Layout.parse(layout).world_size, layout, level):
        assert seen["dtype"] == torch.bfloat16
        assert seen["tied"]
        assert seen["values"].equal(before["gpt.embedding.weight"].bfloat16().float())
        assert not seen["values"].equal(before["gpt.embedding.weight"])
        half = {name for name, dtype in stored.items() if dtype == "torch.bfloat16"}
        assert half == {"table", "gpt.waves"}, "weights and running statistics stay fp32"


def stored_in(job: Job, layout: str, storage: str, init: Any) -> tuple[set[str], str]:
    with join(job, layout) as run:
        engine = run.setup(
            Plain,
            text_loss,
            optimizer=adamw,
            precision="bf16",
            numerics={"storage_dtype": storage, "accept": ["bf16-weights"]},
            shard={"level": "zero2"},
            init=init,
        )
        rounded = fingerprint({name: tensor.bfloat16().float() for name, tensor in weights(engine).items()})
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=2, workers=0):
            engine.step(batch)
        return {str(parameter.dtype) for _, parameter in engine.stored}, rounded


@pytest.mark.parametrize("init", ["auto", "by-name"])
def test_weights_stored_in_bf16_are_the_rounded_ones_of_fp32(ranks: RankPool, init: str) -> None:
    ((kinds, values),) = ranks.run(stored_in, 1, "single", "fp32", init)
    assert kinds == {"torch.float32"}
    for layout in ("single", "dp=2", "fsdp=2"):
        for found in ranks.run(stored_in, Layout.parse(layout).world_size, layout, "bf16", init):
            assert found == ({"torch.bfloat16"}, values)


def wire_formats(job: Job, layout: str, level: str, reduce_dtype: Format) -> set[torch.dtype]:
    """What gradients travel in: the formats of all large sums of one step."""
    found: set[torch.dtype] = set()
    summing = [name for name in dir(dist) if name == "all_reduce" or name.startswith("reduce_scatter")]
    originals = {name: getattr(dist, name) for name in summing}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.update(t.dtype for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.numel() > 64)
            return original(*args, **kwargs)

        return call

    with join(job, layout) as run:
        engine = run.setup(
            TinyGPT, text_loss, optimizer=adamw, shard={"level": level}, numerics={"reduce_dtype": reduce_dtype}
        )
        try:
            for name, original in originals.items():
                setattr(dist, name, noting(original))
            for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=1, workers=0):
                engine.step(batch)
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
    return found


@pytest.mark.parametrize(("layout", "level"), [("dp=2", "zero3"), ("fsdp=2", "zero1"), ("dp=2,fsdp=2", "zero3")])
def test_gradients_travel_in_the_format_that_was_asked_for(ranks: RankPool, layout: str, level: str) -> None:
    size = Layout.parse(layout).world_size
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert ranks.run(wire_formats, size, layout, level, name) == [{dtype}] * size


# ---- One checkpoint for all levels


def live(job: Job, run_dir: Path, level: str, life: int, stop_after: int | None, layout: str = "fsdp=3") -> list[float]:
    run = join(job, layout, run_dir, meeting=f"{run_dir.name}-{life}")
    try:
        shard = {"level": level, "units": "size" if life == 2 else "auto", "min_params": 500}
        engine = run.setup(Awkward, text_loss, optimizer=partial(by_dimension, Plan({})), clip=0.5, shard=shard)
        losses = []
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=2, steps=7, workers=0):
            out = engine.step(batch)
            losses.append(out.loss)
            if out.step == stop_after:
                run.save()
                break
        return losses
    finally:
        run.leave()


def change_levels(job: Job) -> tuple[list[float], list[float], list[float]]:
    moving = job.folder / "moving"
    lives = [live(job, moving, "zero3", 1, 2), live(job, moving, "zero1", 2, 4), live(job, moving, "zero2", 3, None)]
    back = job.folder / "back"
    lives_back = [live(job, back, "zero2", 1, 2), live(job, back, "zero1", 2, 4), live(job, back, "zero3", 3, None)]
    return live(job, job.folder / "still", "zero3", 1, None), sum(lives, []), sum(lives_back, [])  # noqa: RUF017


@pytest.mark.slow
def test_a_run_goes_on_at_another_level_with_the_losses_of_one_that_never_changed(ranks: RankPool) -> None:
    for still, moving, back in ranks.run(change_levels, 3):
        assert len(still) == 7
        assert moving == pytest.approx(still, rel=1e-6)
        assert back == pytest.approx(still, rel=1e-6)


def checkpoints(job: Job) -> dict[str, Tensors]:
    found = {}
    for level in ("zero1", "zero2", "zero3"):
        live(job, job.folder / level, level, 1, 2)
        shard = job.folder / level / "checkpoints" / "step-00000002" / f"shard-{job.rank:05d}.safetensors"
        found[level] = load_file(shard)
    return found


def test_a_checkpoint_holds_the_same_at_every_level(ranks: RankPool) -> None:
    for found in ranks.run(checkpoints, 3):
        for level in ("zero1", "zero2"):
            assert found[level].keys() == found["zero3"].keys()
            for key, tensor in found["zero3"].items():
                assert found[level][key].shape == tensor.shape, key
                if "key.bias" not in key:  # rounding errors and nothing else
                    torch.testing.assert_close(found[level][key], tensor, rtol=1e-4, atol=1e-6, msg=key)
        kept = {key.partition("@")[0] for key in found["zero1"]}
        assert f"model/{FROZEN}0.weight" in kept
        assert f"model/{UNUSED}weight" in kept


def test_a_continued_run_may_change_how_it_shards_and_not_what_it_computes(tmp_path: Path) -> None:
    config = resolve([Layer("the test", {"recipe": "lm"})]).config
    write_config(tmp_path, config)
    sharded = {"shard": ShardConfig(level="zero1", units="size", min_params=5)}
    check_same_training(RunFolder(tmp_path, 2), config.model_copy(update=sharded))
    with pytest.raises(UserError, match="batch_norm"):
        check_same_training(RunFolder(tmp_path, 2), config.model_copy(update={"batch_norm": "sync"}))


class OtherFrozen(Awkward):
    """The same with other values where nothing trains, as where other pretrained weights are read."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.gpt.blocks[0].get_submodule("mlp").parameters():
            nn.init.constant_(parameter, 7.0)


def replace_frozen(job: Job) -> tuple[str, str]:
    live(job, job.folder / "run", "zero1", 1, 2)
    prints = []
    for life, build in ((2, Awkward), (3, OtherFrozen)):
        run = join(job, "fsdp=3", job.folder / "run", meeting=f"again-{life}")
        engine = run.setup(
            build, text_loss, optimizer=partial(by_dimension, Plan({})), clip=0.5, shard={"level": "zero1"}
        )
        prints.append(fingerprint(weights(engine)))
        run.leave()
    return prints[0], prints[1]


def test_a_checkpoint_brings_frozen_weights_back_too(ranks: RankPool) -> None:
    found = ranks.run(replace_frozen, 3)
    assert len({fingerprint for rank in found for fingerprint in rank}) == 1


# ---- Levels keep the refusals of sharding


def constant_for_some(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    return text_loss(model, batch) if int(batch["x"][0, 0]) % 2 else (torch.zeros(()), 0)


def leave_forwards_out(job: Job) -> None:
    with join(job, "fsdp=2", timeout_minutes=job.patient(15) / 60) as run:
        engine = run.setup(Plain, constant_for_some, optimizer=adamw, shard={"level": "zero1"})
        for batch in run.loader(RaggedTexts(), GLOBAL_BATCH, micro_batch=1, steps=2, workers=0):
            engine.step(batch)


def test_a_loss_that_leaves_the_model_out_is_refused_at_every_level(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="the loss function returned a constant, and a sharded layout"):
        ranks.run(leave_forwards_out, 2)


class FunctionalHead(nn.Module):
    """Uses its embedding as the head without calling it a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = F.linear(self.hidden(self.embedding(tokens)), self.embedding.weight)
        return logits


def train_functional_head(job: Job, min_params: int) -> str:
    with join(job, "fsdp=2") as run:
        shard = {"units": "size", "min_params": min_params}
        engine = run.setup(FunctionalHead, text_loss, optimizer=adamw, shard=shard)
        loader = partial(run.loader, RaggedTexts(), GLOBAL_BATCH, micro_batch=4, steps=1, workers=0)
        return str(error_of(lambda: engine.step(next(iter(loader())))))


def test_a_weight_used_without_its_module_is_refused_in_one_sentence(ranks: RankPool) -> None:
    for text in ranks.run(train_functional_head, 2, 100):
        assert "used without calling the module that holds it" in text
        assert "shard.level = zero1" in text
    assert ranks.run(train_functional_head, 2, 10_000) == ["None", "None"], "the fix works"
