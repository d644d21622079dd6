"""Random streams belong to logical coordinates: each coordinate has its own, the same in every version."""

from __future__ import annotations

from itertools import product

import torch

from lockstep.runtime.seeds import draw_seed, seed_of


def test_every_step_sample_module_and_call_draws_something_else() -> None:
    places = [(), *((position,) for position in range(8)), *product(range(-1, 4), range(3), range(3))]
    seeds = [draw_seed(seed, step, *place) for seed in range(2) for step in range(5) for place in places]
    assert len(set(seeds)) == len(seeds)


def test_neighbouring_coordinates_have_unrelated_streams() -> None:
    drawn = [torch.randn(1000, generator=torch.Generator().manual_seed(draw_seed(0, step, 0))) for step in range(6)]
    between = torch.corrcoef(torch.stack(drawn)) - torch.eye(6)
    assert float(between.abs().max()) < 0.15


def test_the_seeds_of_released_versions_stay_so_that_old_runs_go_on_with_their_masks() -> None:
    assert seed_of(0, "order", 0) == 4_819_849_257_279_361_181
    assert draw_seed(7, 3, 5) == 2_922_083_253_656_457_848
    assert draw_seed(7, 3, 5, 2, 1) == 2_955_948_671_269_253_509
