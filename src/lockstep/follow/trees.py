"""Tensors in whatever holds them: lists, dicts, dataclasses, other objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lockstep.runtime.torch_private import tree_leaves, tree_map

PLAIN = (bool, int, float, str)
"""Values that hold no tensors and mean the same on every rank."""


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, in lists, dicts, dataclasses and other objects that hold tensors themselves."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif type(tree) in (tuple, list):
        for item in tree:
            yield from tensors_of(item)
    elif tree is not None and not isinstance(tree, PLAIN):
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif _holds_tensors(leaf):
                for value in vars(leaf).values():
                    yield from tensors_of(value)


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The value with its tensors changed; what holds them is copied."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if tree is None or isinstance(tree, PLAIN):
        return tree
    # These by hand: torch's general way takes longer than many an operation.
    if type(tree) in (tuple, list):
        return type(tree)([map_tensors(change, item) for item in tree])
    if type(tree) is dict:
        return {key: map_tensors(change, item) for key, item in tree.items()}

    def change_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if _holds_tensors(leaf):
            twin = copy.copy(leaf)
            vars(twin).update({name: map_tensors(change, value) for name, value in vars(leaf).items()})
            return twin
        return leaf

    return tree_map(change_leaf, tree)


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, type | nn.Module | torch.Tensor) or not hasattr(leaf, "__dict__"):
        return False
    return dataclasses.is_dataclass(leaf) or any(isinstance(value, torch.Tensor) for value in vars(leaf).values())
