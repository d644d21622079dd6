"""What a rank holds of a tensor: its part of a whole, where that stands, and who has the same."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from lockstep.parallel.held import Held, hold_value, take_part
from lockstep.parallel.tensor.cut import Along
from lockstep.runtime.axis import Axis


def held_by(
    shape: tuple[int, ...], dim: int, parts: tuple[int, ...], tp: tuple[int, int], fsdp: tuple[int, int]
) -> Held:
    """A parameter of which tp cuts a dim, and fsdp the rows of what is left; each axis as (size, rank)."""
    matrix = Along(Axis("tp", *tp), dim, parts)
    rows = matrix.own if dim == 0 else shape[0]
    return Held("weight", None, shape, (matrix, Along(Axis("fsdp", *fsdp), 0, (rows,))))


CASES = [
    ((12, 5), 0, (12,), 2, 3),
    ((12, 5), 0, (4, 4, 4), 2, 2),
    ((16, 3), 0, (8, 4, 4), 4, 2),
    ((7, 8), 1, (8,), 4, 3),
    ((31, 2), 0, (31,), 4, 2),
    ((3, 6), 1, (2, 4), 2, 5),
]


@pytest.mark.parametrize(("shape", "dim", "parts", "tp", "fsdp"), CASES)
def test_a_rank_has_the_numbers_that_its_boxes_say(shape, dim, parts, tp, fsdp) -> None:
    """Gathering, saving and showing ask one description: what is taken of a whole is what the boxes name in it."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros_like(whole)
    for a, b in product(range(tp), range(fsdp)):
        held = held_by(shape, dim, parts, (tp, a), (fsdp, b))
        own = list(shape)
        for cut in held.cuts:
            own[cut.dim] = cut.own
        part = take_part(held, whole, torch.empty(own))
        assert list(part.shape) == own
        assert sum(box.size for box in held.boxes) == part.numel()
        for box in held.boxes:
            there = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
            assert (part[box.here] == whole[there]).all()
            seen[there] += 1
    assert (seen == 1).all()


def test_a_tensor_has_the_cuts_that_its_shape_shows() -> None:
    held = held_by((12, 6), 1, (6,), (2, 1), (3, 2))
    cuts = {
        "whole": hold_value(held, torch.empty(12, 6)).cuts,
        "of the model, under zero1": hold_value(held, torch.empty(12, 3)).cuts,
        "stored": hold_value(held, torch.empty(4, 3)).cuts,
        "a count": hold_value(held, torch.tensor(3.0)).cuts,
    }
    names = {what: [cut.axis.name for cut in found] for what, found in cuts.items()}
    assert names == {"whole": [], "of the model, under zero1": ["tp"], "stored": ["tp", "fsdp"], "a count": []}
    count = hold_value(held, torch.tensor(3.0), "optimizer/weight/step")
    assert (count.name, count.shape, count.bytes) == ("optimizer/weight/step", (), 4)
    assert (hold_value(held, torch.empty(4, 3)).shape, held.shape) == ((12, 6), (12, 6))


def test_ranks_with_the_same_part_have_the_same_text() -> None:
    texts = {(a, b): held_by((12, 6), 1, (6,), (2, a), (3, b)).replicas for a, b in product(range(2), range(3))}
    assert len(set(texts.values())) == 6
    first, second = (Held("norm", torch.ones(2), (2,), places=(0, 1), place=place) for place in (0, 1))
    assert first.replicas == second.replicas, "a parameter of two stages"
    assert (first.is_first, second.is_first) == (True, False)
    assert Held("other", torch.ones(2), (2,), places=(1,), place=1).replicas != first.replicas


def test_an_empty_tensor_is_nobodys() -> None:
    held = held_by((0, 4), 1, (4,), (2, 0), (2, 1))
    assert held.boxes == []
    assert take_part(held, torch.empty(0, 4), torch.empty(0, 2)).numel() == 0
