"""What is looked at around forwards and steps: buffers that change, parameters that are written to, hooks, freezing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.rehearsal import without_data
from lockstep.layout import Layout
from lockstep.parallel.replicate.buffers import BufferCopies
from lockstep.parallel.whole.alone import WholeSteps
from lockstep.parallel.whole.stay import ParametersStay
from lockstep.parallel.whole.trainable import Trainable


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_buffer_that_holds_nan_has_changed_only_where_it_has(dtype: torch.dtype) -> None:
    buffers = [torch.tensor([1.0, torch.nan, 3.0], dtype=dtype), torch.tensor([1, 2]), torch.tensor([True])]
    copies = BufferCopies(buffers)
    copies.take()
    assert list(copies.changed()) == []
    buffers[0][2] = 4
    buffers[1][0] = 7
    assert [number for number, _ in copies.changed()] == [0, 1]
    copies.put_back()
    buffers[0][0] = torch.nan
    assert [number for number, _ in copies.changed()] == [0]


@pytest.mark.parametrize(
    "use", [lambda one: one.requires_grad_(False), lambda one: one.detach_(), lambda one: one.share_memory_()]
)
def test_what_leaves_the_values_of_a_parameter_alone_is_no_write(use: Callable[[torch.Tensor], object]) -> None:
    model = nn.Linear(2, 2)
    with ParametersStay(model):
        use(model.weight)


@pytest.mark.parametrize("use", [lambda one: one.data.mul_(2), lambda one: one.data.__setitem__(0, 1.0)])
def test_what_writes_to_one_is_refused_by_name(use: Callable[[torch.Tensor], object]) -> None:
    model = nn.Linear(2, 2)
    with ParametersStay(model), pytest.raises(UserError, match="changes the parameter weight"):
        use(model.weight)


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda model: model[1].weight.register_hook(torch.clone), r"1\.weight has a hook on its gradient"),
        (lambda model: model[0].register_full_backward_hook(lambda *_: None), "0 has a backward hook"),
    ],
)
def test_hooks_are_seen_whenever_they_are_registered(register: Callable[[nn.Module], object], said: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    alone, several = (WholeSteps([model], Layout.parse(layout)) for layout in ("single", "dp=2"))
    for steps in (alone, several):
        steps.begin()
        assert steps.hook is None
    handle: object = register(model)
    alone.begin()
    assert alone.hook is not None
    with pytest.raises(UserError, match=said):
        several.begin()
    handle.remove()  # type: ignore[attr-defined]
    alone.begin()
    assert alone.hook is None


def test_what_a_script_freezes_after_a_rollback_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trainable = Trainable([model], [], is_pipeline=False)
    trainable.restore(["0.weight"])  # a run that goes on
    model[0].weight.requires_grad_(True)  # as the script does at every start
    trainable.settle()
    assert trainable.frozen == ["0.weight"]
    trainable.restore([])  # a rollback
    assert trainable.frozen == []
    model[1].bias.requires_grad_(False)
    trainable.settle()
    assert trainable.frozen == ["1.bias"]


def test_a_look_without_data_does_without_cudnn_whose_recurrent_layers_want_weights_in_one_piece():
    before = torch.backends.cudnn.enabled
    with without_data():
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled == before
