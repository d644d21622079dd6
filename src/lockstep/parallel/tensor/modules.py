"""Tensor parallelism: what the modules of a plain model do when their matrices are cut over ranks.

A matrix that fans out is cut by columns (its outputs), and what it returns is a `Cut`; the matrix that takes it in is
cut by rows (its inputs), and its results are added up. In between the user's own code runs. A table of embeddings is
cut by its rows: each rank looks up what it has, and the results are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.follow.around import Forward, replace_forward
from lockstep.parallel.build.materialise import Built, Tensors
from lockstep.parallel.tensor.cut import (
    Along,
    Parts,
    add_up,
    add_up_apart,
    along_axis,
    along_of,
    along_others,
    mark,
    plain,
    take,
    whole_along,
)
from lockstep.runtime.axis import Axis
from lockstep.runtime.torch_private import own_parameters

Kind = Literal["column", "row", "vocabulary", "heads"]


class Role(NamedTuple):
    """How a module is cut: by columns, rows, the entries of its table, or the heads of its attention."""

    kind: Kind
    parts: Parts


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix and nothing else; one that is computed from other parameters is not."""
    plain_matrix = type(module).forward is nn.Linear.forward or _is_conv1d(module)
    return plain_matrix and own_parameters(module).get("weight") is not None


def _is_conv1d(module: nn.Module) -> bool:
    """The transposed matrix of GPT-2 in Hugging Face's library."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and type(module).__module__.startswith("transf")


def features(module: nn.Module) -> tuple[int, int]:
    """How many values a matrix takes, and how many it returns."""
    weight: Any = module.weight
    shape = weight.shape
    return (shape[0], shape[1]) if _is_conv1d(module) else (shape[1], shape[0])


def parameter_cuts(module: nn.Module, role: Role, axis: Axis) -> dict[str, Along]:
    """Which parameters of a module are cut for its role, and how; names are those inside the module."""
    takes, returns = (0, 1) if _is_conv1d(module) else (1, 0)
    if role.kind == "row":
        return {"weight": Along(axis, takes, role.parts)}
    if role.kind == "vocabulary":
        return {"weight": Along(axis, 0, role.parts)}
    if role.kind == "heads":
        assert isinstance(module, nn.MultiheadAttention)
        width = (module.embed_dim,)
        found = {f"in_proj_{name}": Along(axis, 0, width * 3) for name in ("bias", "weight")}
        found |= {f"{name}_proj_weight": Along(axis, 0, width) for name in "qkv"}
        found["out_proj.weight"] = Along(axis, 1, width)
        return {name: one for name, one in found.items() if _parameter(module, name) is not None}
    found = {"weight": Along(axis, returns, role.parts)}
    if getattr(module, "bias", None) is not None:
        found["bias"] = Along(axis, 0, role.parts)
    return found


def _parameter(module: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf, None)


def cut_modules(model: nn.Module, roles: dict[str, Role], axis: Axis) -> dict[str, Along]:
    """Cut a model in place: each rank keeps its part of the matrices that have a role. Returns what is cut, and how."""
    by_parameter: dict[int, nn.Parameter] = {}
    cut: dict[int, Along] = {}
    for name, role in roles.items():
        module = model.get_submodule(name)
        for inner, one in parameter_cuts(module, role, axis).items():
            owner, _, leaf = f"{name}.{inner}".rpartition(".")
            holder = model.get_submodule(owner)
            parameter = own_parameters(holder)[leaf]
            assert parameter is not None
            if id(parameter) not in cut:  # else a tied one, which is cut already
                kept = own_part(parameter, one)
                by_parameter[id(parameter)] = kept
                cut[id(kept)] = one
                cut[id(parameter)] = one
            own_parameters(holder)[leaf] = by_parameter.get(id(parameter), parameter)
        replace_forward(module, partial(_forward_of, role, axis))
    return {name: cut[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in cut}


def open_attention(model: nn.Module) -> None:
    """Let torch's attention modules compute step by step, so that what is cut by sequence can be followed."""
    alone = Role("heads", ())
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and unfit_for_heads(module) is None:
            replace_forward(module, partial(_forward_of, alone, Axis("tp", 1, 0)))


def unfit_for_heads(module: nn.MultiheadAttention) -> str | None:
    """Why an attention module cannot be computed head by head, None where it can."""
    if module.bias_k is not None or module.add_zero_attn:
        return "it has a learnt key (add_bias_kv) or a zero one (add_zero_attn)"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return "it has a forward of its own"
    return None


def cut_matrices(built: Built, roles: dict[str, Role], axis: Axis) -> tuple[Built, dict[str, Along]]:
    """Leave of every matrix that the plan cuts the part of this rank; what initial values are still to come as well."""
    cuts = cut_modules(built.model, roles, axis)
    source = built.tensors
    if source is None:
        return built, cuts

    def parts(names: Collection[str] | None) -> Tensors:
        for name, full in source(names):
            yield name, take(full, cuts[name]) if name in cuts else full

    return Built(built.model, parts), cuts


def own_part(parameter: torch.Tensor, cut: Along) -> nn.Parameter:
    """This rank's part of a parameter."""
    part = take(parameter.detach(), cut).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def _forward_of(role: Role, axis: Axis, _: Forward) -> Forward:
    bodies: dict[str, Callable[..., Any]] = {"column": column, "row": row, "vocabulary": vocabulary, "heads": heads}
    body = bodies[role.kind]

    def cut_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return body(module, axis, role.parts, *args, **kwargs)

    return cut_forward


def column(module: Any, axis: Axis, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    """A matrix of which this rank has some columns: it returns some of the values."""
    result = F.linear(gather_tokens(input, axis), _matrix(module), module.bias)
    return add_cut(result, Along(axis, result.dim() - 1, parts, _origins(axis, module)))


def row(module: Any, axis: Axis, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    """A matrix of which this rank has some rows: it takes some of the values, and all ranks add up their results."""
    part = plain(input)
    if along_axis(input, axis.name) is None:
        part = take(part, Along(axis, input.dim() - 1, parts))
    result = reduce_products(F.linear(mark(part, along_others(input, axis.name)), _matrix(module)), axis)
    return result if module.bias is None else result + module.bias


def vocabulary(module: Any, axis: Axis, parts: Parts, input: torch.Tensor) -> torch.Tensor:
    """A table of which this rank has some rows."""
    first, count = Along(axis, 0, parts).rows_of(axis.rank).start, len(module.weight)
    elsewhere = (input < first) | (input >= first + count)
    padding = module.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + count else None
    found = F.embedding((input - first).masked_fill(elsewhere, 0), module.weight, own_padding)
    return sum_over(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis)


class AttentionCall(NamedTuple):
    """The arguments of torch's own attention module. `is_causal` is only a hint: the mask is there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_padding_mask: torch.Tensor | None = None
    need_weights: bool = True
    attn_mask: torch.Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def heads(
    module: nn.MultiheadAttention,
    axis: Axis,
    parts: Parts,  # noqa: ARG001 - as the others
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's own attention module, on this rank's heads. Its forward hands the matrices to one large function."""
    call = AttentionCall(*args, **kwargs)
    along = partial(Along, axis, parts=(module.embed_dim,), origins=_origins(axis, module))
    is_cut = axis.size > 1 or axis.observer is not None
    query, key, value = (gather_tokens(one, axis) for one in (call.query, call.key, call.value))
    padding, batched = call.key_padding_mask, query.dim() == 3
    if not batched:
        query, key, value = (one.unsqueeze(1) for one in (query, key, value))
        padding = None if padding is None else padding.unsqueeze(0)
    if not module.batch_first or not batched:
        query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    joint: torch.Tensor | None = module.in_proj_weight
    single = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    matrices = single if joint is None else joint.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    parted = []
    for one, matrix, bias in zip((query, key, value), matrices, biases, strict=True):
        values = F.linear(one, matrix, bias)
        values = add_cut(values, along(values.dim() - 1)) if is_cut else values
        parted.append(values.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2))
    mask = _bias(module, call.attn_mask, padding, query.dtype, query.shape[0])
    p = module.dropout if module.training else 0.0
    weights = None
    if call.need_weights:
        scores = parted[0] @ parted[1].transpose(-1, -2) / math.sqrt(module.head_dim)
        scores = scores if mask is None else scores + mask
        shares = F.dropout(scores.softmax(-1), p, p > 0)
        mixed = shares @ parted[2]
        weights = _of_all_heads(shares, axis, call.average_attn_weights)
        weights = weights if batched else weights.squeeze(0)
    else:
        mixed = F.scaled_dot_product_attention(parted[0], parted[1], parted[2], mask, p)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)  # as torch lays it out in memory, which dropout masks depend on
    mixed = mark(plain(mixed), along_others(mixed, axis.name))
    result = reduce_products(F.linear(mixed, module.out_proj.weight), axis)
    if module.out_proj.bias is not None:
        result = result + module.out_proj.bias
    if module.batch_first and batched:
        result = result.transpose(0, 1)
    return (result if batched else result.squeeze(1)), weights


def _bias(
    module: nn.MultiheadAttention,
    attn_mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    dtype: torch.dtype,
    batch: int,
) -> torch.Tensor | None:
    """What is added to the scores; where torch's masks are true, nothing may be seen."""

    def added(mask: torch.Tensor) -> torch.Tensor:
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)

    total = None
    if attn_mask is not None:
        total = added(attn_mask)
        if total.dim() == 3:
            total = total.unflatten(0, (batch, module.num_heads))
    if padding is not None:
        hidden = added(padding)[:, None, None, :]
        total = hidden if total is None else total + hidden
    return total


def _of_all_heads(shares: torch.Tensor, axis: Axis, average: bool) -> torch.Tensor:
    if not average:
        return whole_along(shares, axis.name)
    mean = plain(shares).mean(1) / axis.size
    return mark(add_up(mean, axis), [one.at(one.dim - 1) for one in along_others(shares, axis.name)])


def add_cut(part: torch.Tensor, along: Along) -> torch.Tensor:
    """A tensor, cut along one more dim."""
    return mark(plain(part), (*along_of(part), along))


def reduce_products(part: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks of what a matrix cut by rows returns: on each of them, or, where the axis says so, apart.

    Apart means that each rank keeps some tokens, and norms and residuals work on those (sequence parallelism).
    """
    length = 1 if part.dim() < 3 else list(part.shape)[1]
    if not axis.sequence or length % axis.size or length == 1 or any(one.dim == 1 for one in along_of(part)):
        return sum_over(part, axis)
    along = Along(axis, 1, (length,))
    return mark(add_up_apart(plain(part), along), (*along_of(part), along))


def gather_tokens(value: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A tensor of whose tokens ranks have some each, with all of them: once for all matrices that take it in."""
    if along_axis(value, axis.name) is None:
        return value
    kept: Any = value
    if not hasattr(kept, "gathered"):
        kept.gathered = whole_along(value, axis.name)
    whole: torch.Tensor = kept.gathered
    return whole


def sum_over(part: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the ranks of an axis, of a tensor that may be cut along another one."""
    return mark(add_up(plain(part), axis), along_of(part))


def _matrix(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.weight
    return weight.t() if _is_conv1d(module) else weight


def _origins(axis: Axis, module: nn.Module) -> frozenset[str]:
    return frozenset() if axis.observer is None else frozenset([axis.observer.name_of(module)])
