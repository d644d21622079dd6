"""The backward pass of a stage in two halves: the gradients of its inputs, and later those of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

Gradients = Sequence[torch.Tensor | None]


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Gradients,
    inputs: Sequence[torch.Tensor],
    weights: Iterable[nn.Parameter],
) -> Callable[[], None]:
    """Give `inputs` their gradients; what comes back gives the weights theirs.

    Autograd runs down the paths that lead to the inputs. Where one of their nodes also leads to weights, the gradient
    that arrives there is kept, and the second half begins from it.
    """
    pairs = list(zip(outputs, gradients, strict=True))
    leaves = {_leaf_node(tensor) for tensor in inputs}
    order = _from_roots([_node(tensor) for tensor in outputs])
    on_the_way = set(leaves)
    for node in reversed(order):
        if any(following in on_the_way for following, _ in node.next_functions):
            on_the_way.add(node)
    leading = [(tensor, gradient) for tensor, gradient in pairs if _node(tensor) in on_the_way]
    apart = [(tensor, gradient) for tensor, gradient in pairs if _node(tensor) not in on_the_way]
    wanted = {_leaf_node(weight): weight for weight in weights if weight.requires_grad}
    branches: dict[nn.Parameter, set[Node]] = {}
    for node in on_the_way & set(order):
        for weight in _weights_below(node, on_the_way, wanted):
            branches.setdefault(weight, set()).add(node)

    arrived: dict[Node, tuple[torch.Tensor | None, ...]] = {}

    def keep(node: Node) -> Callable[[tuple[torch.Tensor, ...]], None]:
        def hook(grads: tuple[torch.Tensor, ...]) -> None:
            arrived[node] = grads

        return hook

    branching = {node for nodes in branches.values() for node in nodes}
    handles = [node.register_prehook(keep(node)) for node in branching]
    try:
        if leading:
            roots, grads_of_roots = zip(*leading, strict=True)
            torch.autograd.backward(roots, grads_of_roots, inputs=list(inputs), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()

    groups: dict[frozenset[Node], list[nn.Parameter]] = {}
    for weight, nodes in branches.items():
        groups.setdefault(frozenset(nodes), []).append(weight)

    def backward_of_weights() -> None:
        for nodes, members in groups.items():
            edges, grads = [], []
            for node in nodes:
                for slot, grad in enumerate(arrived.get(node, ())):
                    if grad is not None:
                        edges.append(GradientEdge(node, slot))
                        grads.append(grad)
            if not edges:
                continue
            # From one of several nodes the pass may come to another one, whose gradient is complete already.
            held = [node.register_prehook(lambda _, grads=arrived[node]: grads) for node in nodes if node in arrived]
            try:
                torch.autograd.backward(edges, grads, inputs=members, retain_graph=True)
            finally:
                for handle in held:
                    handle.remove()
        # Outputs that do not lead to the inputs have a part of the graph of their own.
        below = {weight for tensor, _ in apart for weight in _weights_below(_node(tensor), set(), wanted)}
        if below:
            others, grads_of_others = zip(*apart, strict=True)
            torch.autograd.backward(others, grads_of_others, inputs=list(below), retain_graph=True)
        groups.clear()
        arrived.clear()

    return backward_of_weights


def _node(tensor: torch.Tensor) -> Node:
    return tensor.grad_fn or _leaf_node(tensor)


def _leaf_node(tensor: torch.Tensor) -> Node:
    """The node that accumulates the gradient of a leaf."""
    node = tensor.view_as(tensor).grad_fn
    assert node is not None
    accumulate = node.next_functions[0][0]
    assert accumulate is not None
    return accumulate


def _from_roots(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each before those it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        stack.append((node, True))
        stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    return order[::-1]


def _weights_below(node: Node, starts: set[Node], wanted: dict[Node, nn.Parameter]) -> list[nn.Parameter]:
    """The weights that a node leads to without passing another node that gradients are kept at."""
    found: list[nn.Parameter] = []
    seen: set[Node] = set()
    stack = [following for following, _ in node.next_functions if following is not None]
    while stack:
        one = stack.pop()
        if one in starts or one in seen:
            continue
        seen.add(one)
        if one in wanted:
            found.append(wanted[one])
        stack.extend(following for following, _ in one.next_functions if following is not None)
    return found
