"""Initial weights as if on one device, whatever the layout.

A small model is built by every rank under one seed. A large one is built by rank 0 and sent tensor by tensor. A model
built on the meta device, or with `init = "by-name"`, has each module initialise itself under a seed of its own name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from lockstep.errors import UserError
from lockstep.runtime.comm import Comm
from lockstep.runtime.seeds import seed_host, seed_of
from lockstep.runtime.torch_private import own_buffers

BUILD_EVERYWHERE_BYTES = 1 << 30
"""Up to this size every rank builds the model itself; above it rank 0 does and sends the tensors."""

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Built:
    """A model as one device would build it. One without storage has its initial values somewhere else, still.

    `tensors(names)` gives the full initial tensors of these names (None: of all), one at a time; every rank calls it.
    """

    model: nn.Module
    tensors: Callable[[Collection[str] | None], Tensors] | None


def build_initial(
    build_model: Callable[[], nn.Module],
    *,
    comm: Comm,
    device: torch.device,
    seed: int,
    by_name: bool = False,
    everywhere_bytes: int = BUILD_EVERYWHERE_BYTES,
) -> Built:
    """Build the model under the run's seed: in the memory of the host, or without storage where it is too large."""

    def build(on: str) -> nn.Module:
        seed_host(seed_of(seed, "init"))
        with torch.device(on):
            model = build_model()
        _refuse_lazy(model)
        return model

    built: list[nn.Module] = []  # by rank 0, so far

    def build_first() -> tuple[int, bool]:
        built.append(build("meta" if by_name else "cpu"))
        _refuse_accelerator(built[0])
        tensors = [tensor for _, tensor in named_tensors(built[0])]
        return sum(t.numel() * t.element_size() for t in tensors), any(t.is_meta for t in tensors)

    # Not a collective: the others wait as long as the build takes.
    size, on_meta = comm.once("build the model", build_first)
    model = built[0] if built else None
    if on_meta:
        return Built(model or build("meta"), lambda names: _only(initialise_by_name(build("meta"), seed), names))
    if size <= everywhere_bytes or comm.world_size == 1:
        model = model or build("cpu")
        _check_equal(model, comm)
        return Built(model, None)
    source = dict(named_tensors(model)) if model is not None else None
    return Built(build("meta"), lambda names: _sent_by_rank_0(build("meta"), source, device, names))


def materialise(built: Built, cut: Callable[[nn.Module], None], device: torch.device) -> nn.Module:
    """`cut` the model and give it its initial values on the device."""
    if built.tensors is None:
        built.model.to(device)
        cut(built.model)
    else:
        cut_on_meta(built.model, cut, device)
        fill(named_tensors(built.model), built.tensors(None))
    return built.model


def fill_buffers(built: Built) -> None:
    """Give the buffers of a model without storage their values, and only them."""
    if built.tensors is None:
        return
    names = [name for name, _ in built.model.named_buffers()]
    for name, tensor in built.tensors(names):
        owner, _, leaf = name.rpartition(".")
        own_buffers(built.model.get_submodule(owner))[leaf] = tensor


def cut_on_meta(model: nn.Module, cut: Callable[[nn.Module], None], device: torch.device) -> None:
    """Cut a model that has no storage yet and give it uninitialised storage, keeping tied weights tied."""
    ties = tied_names(model)
    cut(model)
    model.to_empty(device=device)
    _tie(model, ties)


def named_tensors(model: nn.Module) -> Tensors:
    """Every parameter and buffer once, non-persistent buffers included, under its original name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def fill(stored: Iterable[tuple[str, torch.Tensor]], tensors: Tensors) -> None:
    """Copy full tensors into what is stored under their names, each rank keeping its own slice."""
    targets = dict(stored)
    for name, full in tensors:
        target = targets.pop(name, None)
        if target is None:
            continue  # a second name of a tied weight, or of another stage
        if isinstance(target, DTensor):
            placed = distribute_tensor(
                full.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            )
            target.to_local().copy_(placed.to_local())
        else:
            target.copy_(full)
    assert not targets, f"no initial value for {sorted(targets)}"


def initialise_by_name(skeleton: nn.Module, seed: int) -> Tensors:
    """Initial values of a meta model, one module at a time, each under a seed from the run's seed and its name.

    A module with `init_weights` initialises all below it, one with `reset_parameters` what it owns itself.
    """
    without: list[str] = []
    for name, module in _initialisers(skeleton, "", without):
        whole = hasattr(module, "init_weights")
        ties = tied_names(module) if whole else []
        module.to_empty(device="cpu", recurse=whole)
        _tie(module, ties)
        tensors = list(_own_tensors(module, name, whole))
        for _, tensor in tensors:
            _poison(tensor)
        seed_host(seed_of(seed, "init", name))
        module.init_weights() if whole else module.reset_parameters()  # type: ignore[operator]
        for tensor_name, tensor in tensors:
            if _is_poisoned(tensor):
                raise UserError(
                    f"{tensor_name} is left uninitialised by {type(module).__name__}",
                    f"set it in {'init_weights' if whole else 'reset_parameters'}, or build the model on the CPU",
                )
        yield from ((tensor_name, tensor.detach()) for tensor_name, tensor in tensors)
        module.to_empty(device="meta", recurse=whole)
    if without:
        raise UserError(
            f"these modules cannot initialise themselves: {', '.join(without)}",
            "give them reset_parameters() or init_weights(), or build the model on the CPU",
        )


def _initialisers(module: nn.Module, name: str, without: list[str]) -> Iterator[tuple[str, nn.Module]]:
    owns = any(True for _ in _own_tensors(module, name, False))
    if hasattr(module, "init_weights"):
        yield name, module
        return
    if owns and hasattr(module, "reset_parameters"):
        yield name, module
    elif owns:
        without.append(f"{name or 'the model'} ({type(module).__name__})")
    for child_name, child in module.named_children():
        yield from _initialisers(child, f"{name}.{child_name}" if name else child_name, without)


def _own_tensors(module: nn.Module, name: str, recurse: bool) -> Tensors:
    prefix = f"{name}." if name else ""
    for leaf, parameter in module.named_parameters(recurse=recurse):
        yield prefix + leaf, parameter
    for leaf, buffer in module.named_buffers(recurse=recurse):
        yield prefix + leaf, buffer


@torch.no_grad()
def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype != torch.bool and tensor.numel() > 0 and bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _sent_by_rank_0(
    skeleton: nn.Module, source: dict[str, torch.Tensor] | None, device: torch.device, names: Collection[str] | None
) -> Tensors:
    """The full tensors of rank 0's model on every rank, one at a time, so that no rank ever holds two."""
    for name, shape in named_tensors(skeleton):
        if names is not None and name not in names:
            continue
        full = torch.empty_like(shape, device=device) if source is None else source[name].detach().to(device)
        full = full.contiguous()
        dist.broadcast(full, src=0)
        yield name, full


def _only(tensors: Tensors, names: Collection[str] | None) -> Tensors:
    return (one for one in tensors if names is None or one[0] in names)


def _check_equal(model: nn.Module, comm: Comm) -> None:
    """Every rank must have built the same weights; one that did not would train another model silently."""
    if comm.world_size == 1:
        return
    sums = {name: checksum(tensor) for name, tensor in named_tensors(model)}
    whole = zlib.crc32(repr(sums).encode())
    if len(set(comm.gather(whole))) == 1:
        return
    everybody = comm.gather(sums)
    for rank, theirs in enumerate(everybody):
        for name, value in everybody[0].items():
            if theirs.get(name) != value:
                raise UserError(
                    f"build_model gives other values for {name} on rank {rank} than on rank 0",
                    "draw them from torch's, numpy's or random's global stream, which Lockstep seeds",
                )
    raise UserError("build_model gives other parameter names on some ranks", "build the same model on every rank")


def checksum(tensor: torch.Tensor) -> int:
    """Changes with any bit of a tensor in the memory of the host."""
    if tensor.numel() == 0:
        return 0
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make names one parameter again: `to_empty` gives each of them its own."""
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, parameter)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names that are one parameter, where a parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in named_tensors(model):
        if is_lazy(tensor):
            raise UserError(
                f"build_model left {name} without a shape (a Lazy module)",
                "give the layer its sizes, or call the model once on an example inside build_model",
            )


def _refuse_accelerator(model: nn.Module) -> None:
    for name, tensor in named_tensors(model):
        if tensor.device.type not in ("cpu", "meta"):
            raise UserError(
                f"build_model put {name} on {tensor.device}",
                "build on the CPU and leave devices to Lockstep, so that every layout starts from the same numbers",
            )
