"""The number formats a model is stored and computed in, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import Format, NumericsConfig
from lockstep.follow.around import Forward, replace_forward

# Private in torch 2.11 and 2.13: what torch.func.functional_call does around a call of the module, hooks included.
from lockstep.runtime.torch_private import AnyBatchNorm, AnyNorm, own_buffers, with_tensors
from lockstep.step.precision import DTYPES, compute_in

NORMS = (AnyNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers whose kernels take weights in fp32, or in the format of their input, and nothing between."""


def dtype_of(name: Format | None) -> torch.dtype | None:
    """torch's name of a format."""
    return DTYPES[name] if name else None


def sum_dtype(stored: torch.dtype, reduce_dtype: Format) -> torch.dtype:
    """What gradients of parameters stored in one format are summed in: fp32 means that at least."""
    return torch.promote_types(stored, torch.float32) if reduce_dtype == "fp32" else DTYPES[reduce_dtype]


@torch.no_grad()
def store_in(model: nn.Module, numerics: NumericsConfig) -> None:
    """Round what the model stores: its parameters, and its buffers but for the running statistics of BatchNorm."""
    if numerics.storage_dtype != "fp32":
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[numerics.storage_dtype])
    if (dtype := dtype_of(numerics.buffer_dtype)) is None:
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and not isinstance(module, AnyBatchNorm):
                own_buffers(module)[name] = buffer.to(dtype)


def accept_rounded(model: nn.Module, param_dtype: Format, device: torch.device) -> None:
    """Make a forward work with rounded weights: norms see them as fp32, as under autocast on a GPU, and whoever calls
    the model outside a step, to generate text say, is under autocast too.
    """
    for module in model.modules():
        if isinstance(module, NORMS):
            _cast_in_forward(module, torch.float32, lambda _: True)

    def autocast(forward: Forward) -> Forward:
        def under_autocast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with compute_in(param_dtype, device):
                return forward(module, *args, **kwargs)

        return under_autocast

    replace_forward(model, autocast)


def compute_with(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], param_dtype: Format) -> None:
    """Let the model's forward see its parameters rounded to a format; the parameters themselves get the gradients.

    Block by block: a recomputed block has to round its own again.
    """
    dtype = DTYPES[param_dtype]
    for _, block in blocks:
        _cast_in_forward(block, dtype, lambda _: True)
    prefixes = tuple(f"{name}." for name, _ in blocks)
    _cast_in_forward(model, dtype, lambda name: not name.startswith(prefixes))


def _cast_in_forward(module: nn.Module, dtype: torch.dtype, wanted: Callable[[str], bool]) -> None:
    def casting(forward: Forward) -> Forward:
        def cast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            rounded: dict[nn.Parameter, torch.Tensor] = {}  # a tied weight is rounded once
            values: dict[str, torch.Tensor] = {}
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter.is_floating_point() and wanted(name):
                    values[name] = rounded.setdefault(parameter, parameter.to(dtype))
            with with_tensors(module, values):
                return forward(module, *args, **kwargs)

        return cast

    replace_forward(module, casting)
