"""Whose fault a loss is that is not finite, from what every rank has found."""

from __future__ import annotations

import pickle

import pytest

from lockstep.errors import NonFiniteError
from lockstep.faults.nonfinite import Found, blame
from lockstep.layout import Layout

NAMES = ["first.weight", "second.weight", "norm.running_mean"]
FINE = Found(None, [], [], 0, 2)


def bad(*ids: int, of: int = 2, with_nan: list[int] | None = None) -> Found:
    """A rank of which one micro-batch is not finite."""
    return Found(None, list(ids), with_nan or [], 1, of)


@pytest.mark.parametrize(
    ("layout", "reports", "rank", "ids"),
    [
        ("single", [bad(3)], 0, [3]),
        ("dp=2", [FINE, bad(5, 6)], 1, [5, 6]),
        ("dp=2", [bad(1), bad(5)], None, [1, 5]),
        ("tp=2", [bad(1), bad(1)], None, [1]),
        ("dp=2,tp=2", [FINE, FINE, bad(5), bad(5)], 2, [5]),
        ("pp=2", [Found(None, [], [], 0, 0), bad(1)], None, [1]),
        ("dp=4", [bad(1), FINE, bad(5), FINE], None, [1, 5]),
    ],
)
def test_one_rank_is_named_where_its_samples_are_its_own(
    layout: str, reports: list[Found], rank: int | None, ids: list[int]
) -> None:
    error = blame(7, reports, Layout.parse(layout).data_rank, NAMES)
    assert (error.what, error.step, error.rank, error.sample_ids, error.tensor) == ("loss", 7, rank, ids, None)
    assert not error.is_everywhere
    assert str(error).endswith("look at these samples, or lower the learning rate if they are sound")


def test_the_first_tensor_that_was_not_finite_is_named_and_no_samples() -> None:
    reports = [Found("norm.running_mean", [1], [], 1, 1), Found("second.weight", [2], [2], 1, 1)]
    error = blame(7, reports, Layout.parse("dp=2").data_rank, NAMES)
    assert (error.tensor, error.rank, error.sample_ids) == ("second.weight", None, [])
    assert "sample" not in str(error)
    assert error.fix.startswith("go back to an older checkpoint")
    assert blame(1, reports, Layout.parse("dp=2").data_rank, NAMES).fix.startswith("look at how the model is built")


def test_where_every_micro_batch_is_bad_the_samples_come_second_unless_one_holds_nan() -> None:
    data_rank = Layout.parse("dp=2").data_rank
    error = blame(7, [bad(1, of=1), bad(5, of=1)], data_rank, NAMES)
    assert error.is_everywhere
    assert error.fix.startswith("lower the learning rate")
    assert not blame(7, [bad(1, of=1)], Layout.parse("single").data_rank, NAMES).is_everywhere
    found = blame(7, [bad(1, of=1), bad(5, of=1, with_nan=[5])], data_rank, NAMES)
    assert "(sample ids 1, 5; NaN is in sample ids 5): look at these" in str(found)


def test_the_error_travels_between_processes() -> None:
    error = NonFiniteError("loss", 3, 1, [5], with_nan=[5], is_everywhere=True)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
