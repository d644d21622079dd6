"""What can be cut in a plain model: its blocks, the parts of a pipeline's stages, and the cuts that balance them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.blocks import (
    ModelPlan,
    PipelinePart,
    choose_cuts,
    find_blocks,
    find_parts,
    record_calls,
    seed_points,
)


class Layer(nn.Module):
    """Something with parameters inside, that nobody divides unless stages are short."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x)))  # type: ignore[no-any-return]


class Small(Layer):
    pass


class Runs(nn.Module):
    """Holds modules and calls them by name, in the order in which they were given."""

    def __init__(self, calls: str = "", **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._calls = calls.split() or list(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._calls:
            module = self.get_submodule(name)
            for one in module if isinstance(module, nn.ModuleList) else [module]:
                x = one(x)
        return x


def layers(count: int, kind: type[nn.Module] = Layer) -> list[nn.Module]:
    return [kind() for _ in range(count)]


def names(modules: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in modules]


# ---- Blocks


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (nn.ModuleList(layers(3)), ["0", "1", "2"]),
        (Runs(first=nn.Linear(4, 4), h=nn.ModuleList(layers(2)), last=nn.Linear(4, 4)), ["h.0", "h.1"]),
        (Runs(h=nn.Sequential(*layers(2))), ["h.0", "h.1"]),
        (Runs(h=nn.ModuleDict({"a": Layer(), "b": Layer()})), ["h.a", "h.b"]),
        (
            Runs(encoder=Runs(layers=nn.ModuleList(layers(2))), decoder=Runs(layers=nn.ModuleList(layers(2, Small)))),
            ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
        ),
        # A list of one repeats nothing, and neither does one of different classes or with something empty in it.
        (Runs(h=nn.ModuleList(layers(1))), []),
        (Runs(h=nn.ModuleList([Layer(), nn.Linear(4, 4)])), []),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
        (nn.Sequential(nn.Dropout(), nn.Dropout()), []),
        (Runs(a=Layer(), b=Layer()), []),
        (Layer(), []),
        # The outermost list is the one that counts.
        (Runs(h=nn.ModuleList(nn.Sequential(*layers(2)) for _ in range(2))), ["h.0", "h.1"]),
        (Runs(h=nn.ModuleList([nn.Sequential(*layers(2))])), ["h.0.0", "h.0.1"]),
        # A list in a list is never called: what it holds is.
        (
            Runs(h=nn.ModuleList(nn.ModuleList([Layer(), Small()]) for _ in range(2))),
            ["h.0.0", "h.0.1", "h.1.0", "h.1.1"],
        ),
        (
            Runs(h=nn.ModuleList(nn.ModuleDict({"mix": Layer(), "act": nn.ReLU()}) for _ in range(2))),
            ["h.0.mix", "h.1.mix"],
        ),
    ],
    ids=str,
)
def test_blocks_are_what_repeats_in_the_outermost_lists(model: nn.Module, blocks: list[str]) -> None:
    found = find_blocks(model)
    assert names(found) == blocks
    assert all(model.get_submodule(name) is block for name, block in found)


def test_a_block_is_something_that_is_called() -> None:
    deep = nn.ModuleList(nn.ModuleList(nn.ModuleList(layers(2)) for _ in range(2)) for _ in range(2))
    for name, block in find_blocks(deep):
        assert not isinstance(block, nn.ModuleList | nn.ModuleDict), name


# ---- Random streams


def streams(model: nn.Module) -> list[str]:
    by_id = {id(module): name for name, module in model.named_modules()}
    return [by_id[id(module)] for module in seed_points(model, [block for _, block in find_blocks(model)])]


def test_a_stream_begins_with_every_block_and_with_what_draws_outside_of_them() -> None:
    model = Runs(
        embedding=nn.Embedding(4, 4),
        dropout=nn.Dropout(),
        h=nn.ModuleList([Layer(dropout=True), Layer(dropout=True)]),
        norm=nn.LayerNorm(4),
        pool=Layer(dropout=True),
        head=nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)),
    )
    assert streams(model) == ["h.0", "h.1", "dropout", "pool", "pool.dropout", "head.1"]


def test_modules_of_torch_draw_only_where_they_say_so() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(),
        nn.RReLU(),
        nn.AlphaDropout(),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        nn.MultiheadAttention(4, 1, dropout=0.1),
    )
    assert streams(model) == ["2", "3", "4", "5", "6"]


def test_a_module_that_stands_in_two_places_has_one_stream() -> None:
    shared = nn.Dropout()
    assert streams(Runs(a=shared, b=nn.Linear(4, 4), c=nn.Sequential(shared, nn.ReLU()))) == ["a"]


def test_a_stream_of_a_module_around_blocks_would_end_with_the_first_of_them() -> None:
    model = Runs(body=Runs(dropout=nn.Dropout(), h=nn.ModuleList(layers(2)), own=Layer()), head=nn.Linear(4, 4))
    assert streams(model) == ["body.h.0", "body.h.1", "body.dropout", "body.own"]


# ---- Parts


def parts_of(model: nn.Module, stages: int = 2, call: Callable[[nn.Module], Any] | None = None) -> list[str]:
    x = torch.zeros(2, 4)
    calls = record_calls(model, lambda: (call or (lambda m: m(x)))(model))
    return names(find_parts(model, calls, stages))


def test_parts_are_blocks_and_the_outermost_modules_around_them() -> None:
    model = Runs(
        first=Layer(),
        body=Runs(h=nn.ModuleList(layers(2)), norm=nn.LayerNorm(4)),
        head=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    )
    assert parts_of(model) == ["first", "body.h.0", "body.h.1", "body.norm", "head.0", "head.1", "head.2"]


def test_parts_come_in_the_order_of_their_calls() -> None:
    model = Runs("norm h first", first=nn.Linear(4, 4), h=nn.ModuleList(layers(2)), norm=nn.LayerNorm(4))
    assert parts_of(model) == ["norm", "h.0", "h.1", "first"]


def test_what_is_called_twice_or_never_is_no_part() -> None:
    model = Runs("act a act b", a=nn.Linear(4, 4), b=nn.Linear(4, 4), act=nn.ReLU(), unused=nn.Linear(4, 4))
    assert parts_of(model) == ["a", "b"]


def test_the_largest_parts_are_divided_where_there_are_too_few() -> None:
    model = Runs(small=nn.Linear(4, 4), large=Layer())
    assert parts_of(model, stages=2) == ["small", "large"]
    assert parts_of(model, stages=3) == ["small", "large.up", "large.down", "large.dropout"]
    assert parts_of(model, stages=9) == ["small", "large.up", "large.down", "large.dropout"]


def test_a_model_that_cannot_be_divided_is_one_part() -> None:
    assert parts_of(Runs(only=nn.Linear(4, 4)), stages=4) == ["only"]


def test_a_loss_that_calls_the_model_twice_is_refused() -> None:
    with pytest.raises(UserError, match="the loss function calls the model 2 times"):
        parts_of(Runs(a=nn.Linear(4, 4), b=nn.Linear(4, 4)), call=lambda m: m(torch.zeros(2, 4)) + m(torch.ones(2, 4)))


def test_a_loss_may_call_modules_of_the_model_instead_of_it() -> None:
    model = Runs(a=nn.Linear(4, 4), b=Runs(h=nn.ModuleList(layers(2)), norm=nn.LayerNorm(4)), c=nn.Linear(4, 4))
    call = lambda m: m.get_submodule("c")(m.get_submodule("b")(torch.zeros(2, 4)))  # noqa: E731
    assert parts_of(model, call=call) == ["b.h.0", "b.h.1", "b.norm", "c"]


def test_a_block_that_is_called_twice_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"the block h\.0 is called 2 times in one forward"):
        parts_of(Runs("h h", h=nn.ModuleList(layers(2))))


def test_recording_leaves_no_hooks_behind() -> None:
    model = Runs(a=nn.Linear(4, 4), b=Layer())

    def fails(_: nn.Module) -> None:
        model(torch.zeros(2, 4))
        raise RuntimeError("as users' code does")

    with pytest.raises(RuntimeError):
        parts_of(model, call=fails)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- Cuts


def part(number: int, work: float = 1.0, parameters: int = 1) -> PipelinePart:
    return PipelinePart(f"layers.{number}", "Layer", False, parameters, work)


def stage_work(parts: list[PipelinePart], cuts: list[int]) -> list[float]:
    return [sum(one.work for one in parts[a:b]) for a, b in itertools.pairwise(cuts)]


def test_the_slowest_stage_is_as_fast_as_any_cuts_can_make_it() -> None:
    draw = random.Random(3)
    for _ in range(300):
        count = draw.randint(2, 9)
        parts = [part(n, draw.choice([0.0, 1.0, draw.random()]), draw.choice([0, 1, 1])) for n in range(count)]
        candidates = [n for n, one in enumerate(parts) if one.can_begin][1:]
        for stages in range(1, len(candidates) + 2):
            cuts, _ = choose_cuts(parts, stages, None)
            possible = [[0, *some, count] for some in itertools.combinations(candidates, stages - 1)]
            assert cuts in possible
            best = min(max(stage_work(parts, some)) for some in possible)
            assert max(stage_work(parts, cuts)) == pytest.approx(best)


def test_of_equally_good_cuts_the_earlier_ones_are_taken() -> None:
    """The first stages of a pipeline hold the most micro-batches."""
    assert choose_cuts([part(n) for n in range(3)], 2, None)[0] == [0, 1, 3]
    assert choose_cuts([part(n) for n in range(7)], 3, None)[0] == [0, 2, 4, 7]


def test_equal_parts_are_shared_out_equally() -> None:
    assert choose_cuts([part(n) for n in range(8)], 4, None)[0] == [0, 2, 4, 6, 8]


def test_a_stage_does_not_begin_with_a_layer_that_has_no_parameters() -> None:
    parts = [part(0), part(1, parameters=0), part(2), part(3, parameters=0)]
    assert choose_cuts(parts, 2, None)[0] == [0, 2, 4]
    with pytest.raises(UserError, match=r"can be cut into at most 2 \(layers\.0, layers\.2\): use at most 2 stages"):
        choose_cuts(parts, 3, None)


def test_a_model_of_one_part_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="use a dp or fsdp layout"):
        choose_cuts([part(0)], 2, None)


def test_stated_cuts_are_obeyed() -> None:
    parts = [part(n) for n in range(6)]
    assert choose_cuts(parts, 3, ["layers.1", "layers.5"]) == ([0, 1, 5, 6], "pipeline.cuts says so")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (["layers.1"], "pipeline.cuts names 1 modules, and 3 stages have 2 cuts between them"),
        (["layers.1", "layers.2", "layers.3"], "pipeline.cuts names 3 modules, and 3 stages have 2 cuts between them"),
        (["layers.1", "layer.2"], r"pipeline.cuts names 'layer.2', .*: did you mean layers\.2"),
        (["layers.1", "head"], r"pipeline.cuts names 'head', .*: use some of layers\.1, layers\.2, layers\.3"),
        (["layers.3", "layers.1"], "not the order in which the model calls them"),
        (["layers.3", "layers.3"], "not the order in which the model calls them"),
        (["layers.0", "layers.3"], "not the order in which the model calls them"),
    ],
)
def test_stated_cuts_that_cannot_be_are_refused(stated: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_cuts([part(n) for n in range(6)], 3, stated)


def test_a_plan_knows_the_stage_and_the_work_of_its_parts() -> None:
    plan = ModelPlan([part(0, 1.0), part(1, 2.0), part(2, 6.0)], [0, 2, 3], {}, {}, [], "")
    assert plan.stages == 2
    assert [plan.stage_of(number) for number in (-1, 0, 1, 2)] == [0, 0, 0, 1]
    assert plan.work() == [3.0, 6.0]
    assert plan.imbalance == pytest.approx(6.0 / 4.5)
