"""What can be cut in a plain model: its repeated blocks."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers, in order: children of one class in an outermost list of at least two.

    A block is the unit of sharding, of recompute and of random streams. A model without repeated layers has none
    and is treated as a whole.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def visit(module: nn.Module, name: str) -> None:
        children = list(module.named_children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        same_class = len({type(child) for _, child in children}) == 1
        if is_list and len(children) >= 2 and same_class and all(list(c.parameters()) for _, c in children):
            blocks.extend((f"{name}{child_name}", child) for child_name, child in children)
            return
        for child_name, child in children:
            visit(child, f"{name}{child_name}.")

    visit(model, "")
    return blocks
