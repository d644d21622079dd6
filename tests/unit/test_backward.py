"""The backward pass in two halves gives the gradients of the whole one: of the inputs first, of the weights later."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.pipeline.backward import backward_of_inputs

Build = Callable[[list[torch.Tensor], list[nn.Parameter]], list[torch.Tensor]]
"""From inputs and weights to outputs."""


def leaves(inputs: int, weights: int, seed: int = 0) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    draw = torch.Generator().manual_seed(seed)

    def square() -> torch.Tensor:
        return torch.randn(3, 3, generator=draw, dtype=torch.float64)

    return [square().requires_grad_() for _ in range(inputs)], [nn.Parameter(square()) for _ in range(weights)]


def gradients_for(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """None for a loss, as autograd has it."""
    draw = torch.Generator().manual_seed(7)
    return [
        None if output.dim() == 0 else torch.randn(output.shape, generator=draw, dtype=output.dtype)
        for output in outputs
    ]


def assert_same_gradients(build: Build, inputs: int = 1, weights: int = 2, seed: int = 0) -> None:
    def outputs_of(x: list[torch.Tensor], w: list[nn.Parameter]) -> list[torch.Tensor]:
        return [output for output in build(x, w) if output.requires_grad]

    x, w = leaves(inputs, weights, seed)
    outputs = outputs_of(x, w)
    torch.autograd.backward(outputs, gradients_for(outputs))
    expected = [leaf.grad for leaf in (*x, *w)]

    x, w = leaves(inputs, weights, seed)
    outputs = outputs_of(x, w)
    weights_later = backward_of_inputs(outputs, gradients_for(outputs), x, w)
    assert all(weight.grad is None for weight in w)
    inputs_then = [None if tensor.grad is None else tensor.grad.clone() for tensor in x]
    weights_later()
    for then, tensor in zip(inputs_then, x, strict=True):
        now = tensor.grad
        assert now is then is None or (now is not None and then is not None and now.equal(then))
    for found, whole in zip([leaf.grad for leaf in (*x, *w)], expected, strict=True):
        if whole is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


GRAPHS: dict[str, tuple[Build, int, int]] = {
    "layers": (lambda x, w: [F.gelu(F.gelu(x[0] @ w[0]) @ w[1])], 1, 2),
    "a weight used twice": (lambda x, w: [torch.tanh(x[0] @ w[0]) @ w[0]], 1, 1),
    "a weight used twice in one place": (lambda x, w: [x[0] @ (w[0] @ w[0].T)], 1, 1),
    "a weight between two branches": (lambda x, w: [x[0] @ w[0] + (w[0] * w[1]).sum()], 1, 2),
    "a weight that only a second output has": (lambda x, w: [x[0] @ w[0], w[1] * 3.0], 1, 2),
    "a weight off the way of the inputs": (lambda x, w: [x[0] * 2.0 + F.relu(w[0] @ w[1])], 1, 2),
    "a weight that nobody uses": (lambda x, w: [x[0] @ w[0]], 1, 2),
    "an input that is an output": (lambda x, w: [x[0], x[1] @ w[0]], 2, 1),
    "an input that is an output and used": (lambda x, w: [x[0], x[0] @ w[0]], 1, 1),
    "an input that nobody uses": (lambda x, w: [x[0] @ w[0]], 2, 1),
    "all inputs are outputs": (lambda x, w: [x[1], x[0], x[0] @ w[0] @ x[1]], 2, 1),
    "a residual": (lambda x, w: [x[0] + F.relu(x[0] @ w[0]) @ w[1]], 1, 2),
    "an output of an output": (lambda x, w: [(y := x[0] @ w[0]), torch.sin(y) @ w[1]], 1, 2),
    "one output twice": (lambda x, w: [(y := x[0] @ w[0]), y], 1, 1),
    "outputs of one operation": (lambda x, w: list((x[0] @ w[0]).unbind(1)), 1, 1),
    "one of the outputs of an operation": (lambda x, w: [(x[0] @ w[0]).unbind(1)[1] * 2.0], 1, 1),
    "the largest, and where": (lambda x, w: [(x[0] @ w[0]).max(1).values, w[1].sort(1).values], 1, 2),
    "a view": (lambda x, w: [(x[0] @ w[0]).view(9)[2:5], (x[0] @ w[0]).T], 1, 1),
    "in place": (lambda x, w: [(x[0] @ w[0]).mul_(2.0).add_(w[1])], 1, 2),
    "a loss": (lambda x, w: [((x[0] @ w[0]) ** 2).sum()], 1, 1),
    "a loss and more": (lambda x, w: [(x[0] @ w[0]).sum(), w[1] + x[0]], 1, 2),
    "layer norm": (lambda x, w: [F.layer_norm(x[0], (3,), w[0][0], w[1][0])], 1, 2),
    "a detached half": (lambda x, w: [x[0].detach() @ w[0] + x[0] @ w[1].detach()], 1, 2),
    "a gate": (lambda x, w: [torch.where(x[0] > 0, x[0] @ w[0], w[1])], 1, 2),
    "one leading to the other's branch": (lambda x, w: [(y := x[0] @ w[0]) @ w[1], (y * w[1]) @ w[0]], 1, 2),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_then_weights_get_what_one_pass_gives(name: str) -> None:
    build, inputs, weights = GRAPHS[name]
    assert_same_gradients(build, inputs, weights)


@pytest.mark.parametrize("seed", range(200))
def test_any_graph_gets_what_one_pass_gives(seed: int) -> None:
    def build(x: list[torch.Tensor], w: list[nn.Parameter]) -> list[torch.Tensor]:
        dice = random.Random(seed)
        values: list[torch.Tensor] = [*x, *w]
        for _ in range(dice.randint(1, 12)):
            # Recent values more often: deep graphs, and some that are wide.
            a, b = (values[min(len(values) - 1, int(dice.triangular(0, len(values), len(values))))] for _ in range(2))
            operation = dice.randrange(6)
            if operation == 0:
                values.append(torch.tanh(a @ b) / 2)
            elif operation == 1:
                values.append(a + 0.5 * b)
            elif operation == 2:
                values.append(torch.sin(a) * b)
            elif operation == 3:
                values.append(a.T)
            elif operation == 4:
                top, middle, last = a.unbind(0)
                values.append(torch.stack([last, middle, top]))
            else:
                values.append((a.detach() if dice.random() < 0.3 else a) - b)
        outputs = [value for value in values if not isinstance(value, nn.Parameter)]  # those never leave a stage
        return dice.sample(outputs, dice.randint(1, min(4, len(outputs))))

    assert_same_gradients(build, inputs=1 + seed % 3, weights=1 + seed % 4, seed=seed)


def test_gradients_are_added_to_those_of_micro_batches_before() -> None:
    _, w = leaves(0, 1)
    batches = [leaves(1, 0, seed)[0][0] for seed in range(3)]
    later = [backward_of_inputs([(x @ w[0]).sum()], [None], [x], w) for x in batches]
    for weights in later:
        weights()
    torch.testing.assert_close(w[0].grad, sum(x.detach().sum(0) for x in batches)[:, None].expand(3, 3))  # type: ignore[index]


def test_a_frozen_weight_gets_nothing() -> None:
    (x,), w = leaves(1, 2)
    w[0].requires_grad_(False)
    backward_of_inputs([(x @ w[0] @ w[1]).sum()], [None], [x], w)()
    assert w[0].grad is None
    assert w[1].grad is not None


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_recomputed_is_so_in_both_halves(times: int) -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    def build(x: list[torch.Tensor], w: list[nn.Parameter]) -> list[torch.Tensor]:
        y = x[0]
        for number in range(times):
            y = checkpoint(layer, y, w[number], use_reentrant=False)
        return [y]

    assert_same_gradients(build, 1, 2)


def test_the_weights_hooks_run_once_and_only_in_the_second_half() -> None:
    (x,), w = leaves(1, 1)
    seen: list[str] = []
    w[0].register_post_accumulate_grad_hook(lambda _: seen.append("weight"))  # type: ignore[no-untyped-call]
    later = backward_of_inputs([torch.tanh(x @ w[0]) @ w[0]], [torch.ones(3, 3, dtype=torch.float64)], [x], w)
    assert seen == []
    later()
    assert seen == ["weight"]
