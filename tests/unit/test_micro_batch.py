"""How many samples one forward sees where nobody says it."""

from __future__ import annotations

import pytest

from lockstep.config.schema import PipelineConfig
from lockstep.data.order import Order
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.trial.coupling import Coupling
from lockstep.trial.micro_batch import coupled_micro_batch, default_micro_batch

GATHERS = Coupling(cause="the loss compares samples", gathers=True)


SHARES = [("dp=4", 8, 2), ("dp=4", 10, 3), ("fsdp=3", 8, 3), ("dp=2,fsdp=2", 3, 1), ("single", 7, 7)]
"""Layouts, global batches, and what the fullest data rank has of a step."""


@pytest.mark.parametrize(("layout", "global_batch", "share"), SHARES)
def test_one_forward_sees_all_that_the_fullest_rank_has_of_a_step(layout: str, global_batch: int, share: int) -> None:
    cut = Layout.parse(layout)
    assert default_micro_batch(PipelineConfig(), cut, global_batch) == share
    normalises = Coupling(batch_norm="BatchNorm normalises over its samples")
    read = Order(24, global_batch, 1, 0, data_rank=0, data_size=cut.data_size, equal_counts=False)
    chosen = coupled_micro_batch(normalises, cut, read, can_synchronise=True)
    assert chosen is not None
    assert chosen[0] == share, "synchronised, so that together the ranks see the global batch"


def order(size: int) -> Order:
    return Order(size, 8, 4, 0, data_rank=0, data_size=2, equal_counts=False)


def test_a_loss_that_gathers_by_itself_needs_whole_steps_to_the_end_of_an_epoch():
    layout = Layout.parse("dp=2")
    chosen = coupled_micro_batch(GATHERS, layout, order(24), can_synchronise=True)
    assert chosen is not None
    assert chosen[0] == 4
    with pytest.raises(UserError, match=r"last step of an epoch has 4 samples.*use 24 of the 28"):
        coupled_micro_batch(GATHERS, layout, order(28), can_synchronise=True)
