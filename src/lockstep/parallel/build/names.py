"""The names by which people know a model's tensors: the keys of its state_dict."""

from __future__ import annotations

from torch import nn

from lockstep.errors import UserError
from lockstep.runtime.torch_private import own_buffers, own_parameters, without_saving


def state_dict_names(model: nn.Module) -> dict[str, str]:
    """The keys of a model's state_dict, in its order, each with the one name of its tensor; tied keys share it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    first = {id(tensor): name for name, tensor in reversed(named)}
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {k: v for k, v in own_buffers(module).items() if k not in without_saving(module)}
        for leaf, tensor in [*own_parameters(module).items(), *persistent.items()]:
            if tensor is not None:
                found[f"{prefix}.{leaf}" if prefix else leaf] = first[id(tensor)]
    return found


def refuse_extra_state(model: nn.Module) -> None:
    """Refuse modules with state of a kind of their own, which may be any object."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise UserError(
                f"{name or 'the model'} ({type(module).__name__}) has a get_extra_state, which checkpoints cannot hold",
                "keep that state in buffers (register_buffer)",
            )
