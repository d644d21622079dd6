"""The one factor that makes gradient sums clipped gradients of the mean loss, and the norm it follows from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lockstep.step.grads import global_norm, gradient_scale, local_gradients, scale_gradients

CPU = torch.device("cpu")


@pytest.mark.parametrize(("norm", "expected"), [(0.5, 0.25), (2.0, 0.25), (4.0, 0.125), (40.0, 0.0125)])
def test_gradients_that_are_short_enough_keep_their_length(norm: float, expected: float) -> None:
    scale = gradient_scale(torch.tensor(norm), 0.25, clip=2.0)
    assert scale is not None
    assert float(scale) == pytest.approx(expected, rel=1e-5)


def test_nothing_is_multiplied_where_sums_are_means_already() -> None:
    assert gradient_scale(torch.tensor(3.0), 1.0, clip=None) is None
    scale = gradient_scale(torch.tensor(3.0), 0.5, clip=None)
    assert scale is not None
    assert float(scale) == 0.5


def test_the_norm_is_that_of_all_gradients_as_one_vector() -> None:
    grads = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]]), torch.zeros(5)]
    assert float(global_norm(grads, [], CPU)) == 13.0
    assert float(global_norm([], [], CPU)) == 0.0


def test_gradients_in_half_precision_have_a_norm_in_full_precision() -> None:
    grads = [torch.full((1000,), 100.0, dtype=torch.float16)]
    norm = global_norm(grads, [], CPU)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(100 * math.sqrt(1000))


def test_parameters_without_a_gradient_are_left_out_and_the_rest_is_scaled_in_place() -> None:
    used, unused, complex_one = (
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(1) * 1j),
    )
    used.grad, complex_one.grad = torch.tensor([2.0, 4.0]), torch.tensor([3.0 + 4.0j])
    grads = local_gradients([used, unused, complex_one])
    assert float(global_norm(grads, [], CPU)) == pytest.approx(math.sqrt(4 + 16 + 25))
    scale_gradients(grads, torch.tensor(0.5), torch.optim.SGD([used], lr=1.0))
    assert used.grad.tolist() == [1.0, 2.0]
    assert complex_one.grad.tolist() == [1.5 + 2.0j]
    assert unused.grad is None
