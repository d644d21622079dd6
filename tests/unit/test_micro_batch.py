"""How many samples one forward sees where nobody says it."""

from __future__ import annotations

import pytest

from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.trial.coupling import Coupling
from lockstep.trial.micro_batch import coupled_micro_batch

GATHERS = Coupling(cause="the loss compares samples", gathers=True)


def order(size: int) -> Order:
    return Order(size, 8, 4, 0, data_rank=0, data_size=2, equal_counts=False)


def test_a_loss_that_gathers_by_itself_needs_whole_steps_to_the_end_of_an_epoch():
    layout = Layout.parse("dp=2")
    chosen = coupled_micro_batch(GATHERS, layout, order(24), can_synchronise=True)
    assert chosen is not None
    assert chosen[0] == 4
    with pytest.raises(UserError, match=r"last step of an epoch has 4 samples.*use 24 of the 28"):
        coupled_micro_batch(GATHERS, layout, order(28), can_synchronise=True)
