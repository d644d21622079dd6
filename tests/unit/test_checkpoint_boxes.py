"""Who holds what of a tensor: the parts of all ranks fill it once, whatever cuts it."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from lockstep.parallel.boxes import Replicas, cut_boxes, overlap, whole_box


def held(shape: tuple[int, ...], dim: int, parts: tuple[int, ...], tp: tuple[int, int], fsdp: tuple[int, int]):
    """The boxes of one rank of a tensor that is cut along a dim by tp, and by rows over fsdp."""
    boxes = cut_boxes(whole_box(shape), dim, parts, *tp)
    rows = max((box.local[0] + box.shape[0] for box in boxes), default=0)
    return cut_boxes(boxes, 0, (rows,), *fsdp)


CASES = [
    ((12, 5), 0, (12,), 2, 3),
    ((12, 5), 0, (6, 2, 4), 2, 1),
    ((16, 3), 0, (8, 4, 4), 4, 2),
    ((7, 8), 1, (8,), 4, 3),
    ((31, 2), 0, (31,), 4, 2),
    ((2, 6), 1, (2, 4), 2, 5),
    ((3,), 0, (3,), 1, 8),
]


@pytest.mark.parametrize(("shape", "dim", "parts", "tp", "fsdp"), CASES)
def test_the_parts_of_all_ranks_fill_a_tensor_once(shape, dim, parts, tp, fsdp) -> None:
    times = np.zeros(shape, dtype=int)
    for a, b in product(range(tp), range(fsdp)):
        seen = 0
        for box in held(shape, dim, parts, (a, tp), (b, fsdp)):
            times[tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))] += 1
            seen += box.size
            assert box.size > 0
    assert (times == 1).all()


@pytest.mark.parametrize(("shape", "dim", "parts", "tp", "fsdp"), CASES)
def test_what_one_layout_wrote_another_one_puts_together(shape, dim, parts, tp, fsdp) -> None:
    """Every rank of a layout reads from the boxes that another one wrote, and gets what it would have cut out."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    written = [
        (box.start, whole[tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))])
        for a, b in product(range(tp), range(fsdp))
        for box in held(shape, dim, parts, (a, tp), (b, fsdp))
    ]
    for rank in range(3):
        for box in held(shape, 0, (shape[0],), (0, 1), (rank, 3)):
            found = np.full(shape, -1)
            for start, values in written:
                if (common := overlap(box, start, values.shape)) is not None:
                    local, inside, size = common
                    here = tuple(slice(at, at + n) for at, n in zip(local, size, strict=True))
                    there = tuple(slice(at, at + n) for at, n in zip(inside, size, strict=True))
                    assert (found[here] == -1).all()
                    found[here] = values[there]
            expected = whole[box.start[0] : box.start[0] + box.shape[0]]
            assert (found[box.here] == expected).all()


def test_a_single_number_and_an_empty_tensor() -> None:
    assert [box.size for box in whole_box(())] == [1]
    assert whole_box((0, 4)) == []
    assert overlap(whole_box(())[0], (), ()) == ((), (), ())


def test_replicas_share_the_writing_evenly_and_agree_on_it() -> None:
    draw = random.Random(0)
    sizes = sorted((draw.randrange(1, 1000) for _ in range(400)), reverse=True)
    cuts = [(False, draw.random() < 0.5, False, draw.random() < 0.3) for _ in sizes]
    axes = (2, 2, 1, 3)
    load = np.zeros(axes)
    replicas, again = Replicas(axes), Replicas(axes)
    for size, cut in zip(sizes, cuts, strict=True):
        writer = list(replicas.writer(size, cut))
        assert writer == list(again.writer(size, cut))
        assert [at == -1 for at in writer] == list(cut)
        place = tuple(slice(None) if at == -1 else at for at in writer)
        load[place] += size / np.prod([n for n, is_cut in zip(axes, cut, strict=True) if is_cut])
    assert load.max() < 1.05 * load.min()
