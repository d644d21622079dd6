"""autograd.Functions of the user's: seen when they are applied, and whether their backward is linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.runtime.torch_private import function_of, functions_seen, gradients_taken

APART = 2.0**13
"""How far apart gradients are by which a backward is tried out; a power of two, so that nothing is rounded."""


@contextmanager
def own_functions_seen(see: Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]) -> Iterator[None]:
    """Let `see(function, arguments)` say what a Function of the user's is applied to."""
    with functions_seen(lambda function, args: see(function, args) if is_own(function) else args):
        yield


def is_own(function: Any) -> bool:
    """Whether a Function is the user's, neither torch's nor ours."""
    return not function.__module__.startswith(("torch.", "lockstep."))


def nodes_of(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph that lead to some tensors."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        further = [earlier for earlier, _ in node.next_functions if earlier is not None and earlier not in seen]
        seen.update(further)
        waiting += further


def not_linear(loss: torch.Tensor, additive: bool) -> str | None:
    """The name of a Function before a loss whose backward makes something else of a larger gradient than a larger one.

    With `additive`, also of the sum of two. It is called a few times with made-up gradients.
    """
    for node in nodes_of([loss]):
        function = function_of(node)
        if function is not None and is_own(function) and not _is_linear(node, additive):
            return str(function.__name__)
    return None


@torch.no_grad()
def _is_linear(node: Any, additive: bool) -> bool:
    with torch.random.fork_rng([]):
        first, other = ([_made_up(like) for like in gradients_taken(node)] for _ in range(2))
        result = _results(node, first)
        tries = [(_results(node, [g * by for g in first]), [r * by for r in result]) for by in (APART, 1 / APART)]
        if additive:
            both = _results(node, [g + h for g, h in zip(first, other, strict=True)])
            tries.append((both, [r + s for r, s in zip(result, _results(node, other), strict=True)]))
    return all(torch.allclose(a, b, rtol=1e-2) for found, wanted in tries for a, b in zip(found, wanted, strict=True))


def _made_up(like: Any) -> torch.Tensor:
    return torch.randn(tuple(like.shape), device=like.device).to(like.dtype)


def _results(node: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    found = node.apply(*gradients)
    return [
        gradient for gradient in (found if isinstance(found, tuple) else (found,)) if isinstance(gradient, torch.Tensor)
    ]
