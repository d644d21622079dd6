"""`--layout auto`: the layout that is chosen for a model and a machine, and the reason that is given."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lockstep.errors import UserError
from lockstep.planner.search.layout_auto import Facts, choose_layout

GB = 10**9
MODEL = Facts(parameters=10**9, heads=12, sequence=1024, global_batch=64, memory=80 * GB)
"""16 GB of state, and room for 48."""


def test_one_process_has_nothing_to_share() -> None:
    layout, why = choose_layout(MODEL, 1)
    assert str(layout) == "single"
    assert why == "there is one process"


def test_replicas_where_a_rank_can_hold_everything() -> None:
    layout, why = choose_layout(MODEL, 4)
    assert str(layout) == "dp=4"
    assert "take 16 GB" in why
    assert "a rank has 80 GB" in why
    assert "replicas exchange the least" in why


def test_shards_where_it_cannot() -> None:
    layout, why = choose_layout(replace(MODEL, parameters=7 * 10**9), 4)
    assert str(layout) == "fsdp=4"
    assert "take 112 GB" in why
    assert "too much for the 80 GB of a rank" in why
    assert "1/4 of it is not" in why


@pytest.mark.parametrize(("parameters", "axis"), [(3 * 10**9, "dp"), (3 * 10**9 + 1, "fsdp")])
def test_sixty_percent_of_the_memory_may_be_taken(parameters: int, axis: str) -> None:
    layout, _ = choose_layout(replace(MODEL, parameters=parameters), 2)
    assert str(layout) == f"{axis}=2"


def test_ranks_without_samples_share_heads() -> None:
    layout, why = choose_layout(replace(MODEL, global_batch=2), 4)
    assert str(layout) == "dp=2,tp=2"
    assert why == "a step has 2 samples for 4 ranks, and tp=2 divides its 12 heads, so that 2 ranks share a sample"


def test_one_sample_is_one_sample() -> None:
    layout, why = choose_layout(replace(MODEL, global_batch=1), 4)
    assert str(layout) == "tp=4"
    assert why.startswith("a step has 1 sample for 4 ranks, and tp=4 divides its 12 heads")


@pytest.mark.parametrize("heads", [0, 5])
def test_ranks_share_tokens_where_they_cannot_share_heads(heads: int) -> None:
    layout, why = choose_layout(replace(MODEL, heads=heads, global_batch=2), 4)
    assert str(layout) == "dp=2,cp=2"
    assert why == "a step has 2 samples for 4 ranks, so that 2 ranks share the 1024 tokens of a sequence"


@pytest.mark.parametrize("sequence", [0, 6])
def test_where_nothing_can_be_shared_the_ranks_stay_replicas(sequence: int) -> None:
    layout, why = choose_layout(replace(MODEL, heads=0, sequence=sequence, global_batch=2), 4)
    assert str(layout) == "dp=4"
    assert why == "a step has 2 samples for 4 ranks, and neither its heads nor its sequences can be shared by 2"


def test_ranks_that_share_a_sample_may_have_to_shard_as_well() -> None:
    layout, why = choose_layout(replace(MODEL, parameters=9 * 10**9, global_batch=2), 4)
    assert str(layout) == "fsdp=2,tp=2"
    assert "a step has 2 samples for 4 ranks" in why
    assert "take 72 GB" in why, "of a rank that has half of every matrix"
    assert "1/2 of it is not" in why


def test_what_no_layout_can_hold_is_refused_with_the_ranks_it_would_need() -> None:
    with pytest.raises(UserError) as refused:
        choose_layout(replace(MODEL, parameters=70 * 10**9), 8)
    assert "take 1.12 TB" in str(refused.value)
    assert "8 ranks of 80 GB cannot hold that" in str(refused.value)
    assert "use at least 24 ranks" in str(refused.value)
    layout, _ = choose_layout(replace(MODEL, parameters=70 * 10**9), 24)
    assert str(layout) == "fsdp=24"


def test_every_choice_has_a_place_for_every_rank_and_a_reason() -> None:
    grid = itertools.product((10**6, 10**9, 3 * 10**10), (0, 1, 6, 16), (0, 10, 1024), (1, 2, 3, 7, 64), (2**30, 2**37))
    chosen = set()
    for facts in itertools.starmap(Facts, grid):
        for world_size in range(1, 17):
            try:
                layout, why = choose_layout(facts, world_size)
            except UserError:
                continue
            assert layout.world_size == world_size, facts
            assert layout.pp == 1
            assert layout.tp == 1 or facts.heads % layout.tp == 0
            assert layout.cp == 1 or facts.sequence % (2 * layout.cp) == 0
            assert why.strip() == why != ""
            assert not why.endswith("."), "one sentence, shown behind the layout"
            chosen |= {axis for axis in ("dp", "fsdp", "tp", "cp") if getattr(layout, axis) > 1}
    assert chosen == {"dp", "fsdp", "tp", "cp"}


@pytest.mark.parametrize("world_size", range(2, 17))
def test_a_layout_that_is_chosen_fits(world_size: int) -> None:
    for parameters in (10**8, 10**9, 10**10, 3 * 10**10):
        facts = replace(MODEL, parameters=parameters)
        try:
            layout, _ = choose_layout(facts, world_size)
        except UserError:
            assert 16 * parameters / world_size > 0.6 * facts.memory
        else:
            assert 16 * parameters / (layout.fsdp * layout.tp) <= 0.6 * facts.memory
