"""How a tensor is cut over ranks and put together again, and where a cut goes when a tensor is reshaped."""

from __future__ import annotations

import pytest
import torch

from lockstep.parallel.tensor.cut import Along, _padded, along_of, mark, put_cuts_back, put_together, take, take_apart
from lockstep.parallel.tensor.plan_matrices import divisors
from lockstep.parallel.tensor.rules.shapes import divided, follow
from lockstep.runtime.axis import Axis


def of_all_ranks(whole: torch.Tensor, size: int, dim: int, parts: tuple[int, ...], zigzag: bool) -> list[torch.Tensor]:
    return [take(whole, Along(Axis("tp", size, rank, zigzag=zigzag), dim, parts)) for rank in range(size)]


CUTS = [
    pytest.param(2, (8,), False, id="one part"),
    pytest.param(4, (8,), False, id="one part of four ranks"),
    pytest.param(2, (8, 8, 8), False, id="equal parts"),
    pytest.param(4, (8, 8, 8), False, id="equal parts of four ranks"),
    pytest.param(2, (8, 4, 4), False, id="unequal parts"),
    pytest.param(4, (16, 4, 8), False, id="unequal parts of four ranks"),
    pytest.param(2, (8,), True, id="zigzag"),
    pytest.param(3, (12,), True, id="zigzag of three ranks"),
    pytest.param(2, (4, 4, 4), True, id="zigzag of equal parts"),
    pytest.param(2, (4, 8), True, id="zigzag of unequal parts"),
    pytest.param(2, (7,), False, id="odd"),
    pytest.param(4, (9,), False, id="odd of four ranks"),
    pytest.param(4, (5,), False, id="odd, and the last rank has nothing"),
    pytest.param(1, (5,), False, id="one rank"),
]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("size", "parts", "zigzag"), CUTS)
def test_what_is_taken_can_be_put_together(size: int, parts: tuple[int, ...], zigzag: bool, dim: int) -> None:
    shape = [3, 3, 3]
    shape[dim] = sum(parts)
    whole = torch.randn(shape)
    mine = of_all_ranks(whole, size, dim, parts, zigzag)
    assert sum(part.numel() for part in mine) == whole.numel()
    for rank, part in enumerate(mine):
        along = Along(Axis("tp", size, rank, zigzag=zigzag), dim, parts)
        assert part.shape[dim] == along.own
    along = Along(Axis("tp", size, 0, zigzag=zigzag), dim, parts)
    stacked = torch.stack([_padded(part, along) for part in mine])
    assert put_together(stacked, along).equal(whole)


def test_a_part_is_what_it_is_said_to_be() -> None:
    numbers = torch.arange(12)
    assert [part.tolist() for part in of_all_ranks(numbers, 2, 0, (12,), False)] == [[*range(6)], [*range(6, 12)]]
    assert [part.tolist() for part in of_all_ranks(numbers, 2, 0, (4, 4, 4), False)] == [
        [0, 1, 4, 5, 8, 9],
        [2, 3, 6, 7, 10, 11],
    ]
    assert [part.tolist() for part in of_all_ranks(numbers, 2, 0, (8, 2, 2), False)] == [
        [0, 1, 2, 3, 8, 10],
        [4, 5, 6, 7, 9, 11],
    ]


def test_in_zigzag_a_rank_has_one_chunk_from_each_end() -> None:
    numbers = torch.arange(12)
    assert [part.tolist() for part in of_all_ranks(numbers, 3, 0, (12,), True)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


def test_of_an_odd_size_the_last_rank_has_less() -> None:
    assert [len(part) for part in of_all_ranks(torch.arange(31), 4, 0, (31,), False)] == [8, 8, 8, 7]


def test_a_cut_shows_the_shape_of_the_whole_and_a_plain_tensor_is_none() -> None:
    along = Along(Axis("tp", 2, 1), 1, (6,))
    part = mark(torch.zeros(4, 3), [along])
    assert part.shape == (4, 6)
    assert along_of(part) == (along,)
    assert along_of(torch.zeros(4, 3)) == ()
    assert type(mark(part, [])) is torch.Tensor


def test_a_tree_of_cuts_is_taken_apart_and_marked_again() -> None:
    along = Along(Axis("tp", 2, 0), 0, (4,))
    tree = {"a": (mark(torch.ones(2), [along]), torch.zeros(3)), "b": [None, 5]}
    plain, marks = take_apart(tree)
    assert type(plain["a"][0]) is torch.Tensor
    again = put_cuts_back(plain, marks)
    assert along_of(again["a"][0]) == (along,)
    assert along_of(again["a"][1]) == ()
    assert again["b"] == [None, 5]


# ---- Reshapes

FOLLOWED = [
    # shape             target              dim  parts             dim  parts
    ((2, 5, 24),        (2, 5, 6, 4),        2,  (24,),            (2, (6,))),
    ((2, 5, 6, 4),      (2, 5, 24),          2,  (6,),             (2, (24,))),
    ((2, 5, 72),        (2, 5, 3, 6, 4),     2,  (24, 24, 24),     (3, (6,))),
    ((2, 5, 3, 6, 4),   (2, 5, 72),          3,  (6,),             (2, (24, 24, 24))),
    ((2, 5, 72),        (2, 5, 6, 12),       2,  (72,),            (2, (6,))),
    ((2, 5, 24),        (10, 24),            2,  (24,),            (1, (24,))),
    ((2, 8, 24),        (16, 24),            1,  (8,),             (0, (8, 8))),
    ((16, 24),          (2, 8, 24),          0,  (8, 8),           (1, (8,))),
    ((2, 8, 24),        (2, 1, 8, 24),       1,  (8,),             (2, (8,))),
    ((2, 1, 8),         (2, 8),              2,  (8,),             (1, (8,))),
    ((2, 8, 3),         (48,),               1,  (8,),             (0, (24, 24))),
    ((2, 5, 32),        (2, 5, 8, 4),        2,  (16, 8, 8),       (2, (4, 2, 2))),
    ((8, 24),           (8, 4, 6),           0,  (8,),             (0, (8,))),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "target", "dim", "parts", "expected"), FOLLOWED)
def test_a_cut_is_followed_through_a_reshape(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    dim: int,
    parts: tuple[int, ...],
    expected: tuple[int, tuple[int, ...]],
) -> None:
    assert follow(shape, target, Along(Axis("tp", 2, 0), dim, parts)) == expected


@pytest.mark.parametrize(("shape", "target", "dim", "parts", "expected"), FOLLOWED)
def test_a_reshaped_part_is_the_part_of_the_reshaped(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    dim: int,
    parts: tuple[int, ...],
    expected: tuple[int, tuple[int, ...]],
) -> None:
    whole = torch.randn(shape)
    for rank in range(2):
        axis = Axis("tp", 2, rank)
        after = Along(axis, *expected)
        own = [after.own if at == after.dim else size for at, size in enumerate(target)]
        assert take(whole, Along(axis, dim, parts)).reshape(own).equal(take(whole.reshape(target), after))


@pytest.mark.parametrize(
    ("shape", "target", "dim", "parts"),
    [
        ((2, 5, 72), (2, 5, 3, 6, 4), 2, (72,)),
        ((2, 5, 24), (2, 5, 4, 6), 2, (10, 14)),
        ((2, 5, 7), (7, 10), 2, (7,)),
    ],
)
def test_some_reshapes_mix_what_is_cut(
    shape: tuple[int, ...], target: tuple[int, ...], dim: int, parts: tuple[int, ...]
) -> None:
    found = follow(shape, target, Along(Axis("tp", 2, 0), dim, parts))
    if found is not None:  # then at least not into something that ranks could share
        assert not Along(Axis("tp", 2, 0), *found).is_even


@pytest.mark.parametrize(
    ("parts", "sizes", "expected"),
    [
        ((8, 8, 8), [8, 8, 8], [(8,), (8,), (8,)]),
        ((8, 4, 4), [8, 8], [(8,), (4, 4)]),
        ((24,), [24], [(24,)]),
        ((24,), [8, 16], None),
        ((8, 8), [4, 12], None),
    ],
)
def test_pieces_end_where_parts_do(
    parts: tuple[int, ...], sizes: list[int], expected: list[tuple[int, ...]] | None
) -> None:
    assert divided(parts, sizes) == expected


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1"), (2, "1 or 2"), (6, "1, 2, 3 or 6"), (7, "1 or 7"), (12, "1, 2, 3, 4, 6 or 12")]
)
def test_divisors_are_said_as_people_say_them(number: int, said: str) -> None:
    assert divisors(number) == said
