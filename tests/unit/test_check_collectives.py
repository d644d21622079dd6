"""What counts as the right answer of a collective: every value, to the bit where nothing has to be rounded."""

from __future__ import annotations

import pytest
import torch

from lockstep.checkup.check_collectives import FORMATS, differs

FLOATS = [form for form in FORMATS if form.is_floating_point]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_right_values_are_right_in_every_format(form: torch.dtype) -> None:
    right = torch.arange(7).to(form)
    assert differs(right.clone(), right) is None


@pytest.mark.parametrize("roundings", [0, 8])
@pytest.mark.parametrize("planted", [float("nan"), float("inf"), -float("inf"), 0.0, -5.0])
@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_one_wrong_value_is_named_also_where_it_is_no_number(form: torch.dtype, planted: float, roundings: int) -> None:
    right = torch.full((7,), 5).to(form)
    got = right.clone()
    got[6] = planted
    assert differs(got, right, roundings) == f"1 of 7 values are wrong: element 6 is {planted:g} and should be 5"


@pytest.mark.parametrize("form", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_whole_numbers_must_be_the_same(form: torch.dtype) -> None:
    right = torch.arange(7).to(form)
    assert differs(right + 1, right) == "7 of 7 values are wrong: element 0 is 1 and should be 0"


@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_a_mean_may_be_rounded_once_for_every_rank_and_a_sum_never(form: torch.dtype) -> None:
    right = torch.tensor([1.0]).to(form)
    eps = torch.finfo(form).eps
    assert differs(right + 4 * eps, right, roundings=4) is None
    assert differs(right + 8 * eps, right, roundings=4) is not None
    assert differs(right + eps, right) is not None
