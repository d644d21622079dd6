"""One stage of a pipeline: a plain model of which this rank computes some parts.

The stage runs the user's own code from its beginning. Parts of earlier stages are skipped: what they return has no
data. Where the stage begins, the values that cross the cut are there, received from the stage before. Where the next
stage begins, the forward is left.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.around import Forward, replace_forward
from lockstep.follow.rehearsal import apart_from, leaked
from lockstep.follow.trees import map_tensors, tensors_of
from lockstep.follow.values import Rehearsal, Watch, another_path, fake_like, is_fake
from lockstep.runtime.torch_private import FakeTensorMode, call_of, replace_call

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
OF_MODULES = ("_parameters", "_buffers", "_modules", *HOOKS)


class LeftAtCut(BaseException):
    """The forward has come to the next stage. No Exception: code of the user's that catches those must not see it."""


class Stage(nn.Module):
    """A model of which the parts from `first` up to `end` are computed here."""

    def __init__(self, model: nn.Module, parts: Sequence[str], number: int, first: int, end: int) -> None:
        super().__init__()
        self.model = model
        self.number = number
        self.first = first
        self.end = end
        self.is_first = first == 0
        self.is_last = end == len(parts)
        self._parts = list(parts)
        self._watch: Watch | None = None
        self.rehearsal = Rehearsal()
        self._received: Sequence[torch.Tensor] = ()
        self._filled: dict[int, dict[int, torch.Tensor]] = {}

    @property
    def running(self) -> bool:
        """Whether a forward of this stage runs now."""
        return self._watch is not None

    def forget(self) -> None:
        """The step is over: nobody computes anything of it again."""
        self._filled.clear()

    def wire(self) -> None:
        """From now on calls of the parts are answered as this stage has to."""
        for number, name in enumerate(self._parts):
            part = self.model.get_submodule(name)
            replace_call(part, self._part_call(number))
            if number < self.first:
                replace_forward(part, partial(self._skipping, number))

    def forward(self, call: Callable[[nn.Module], Any], received: Sequence[torch.Tensor]) -> Any:
        """Run `call(model)` through this stage: returns what crosses to the next one, or on the last its result.

        `rehearsal` has to be that of the call. It is no argument, because `fully_shard` looks for tensors in those.
        """
        rehearsal = self.rehearsal
        leaving = [] if self.is_last else rehearsal.crossing(self.end)
        self._received = received
        self._watch = watch = Watch(keep=leaving, replayed=None if self.is_first else rehearsal)
        try:
            # A forward that is left half-way may have switched gradients off.
            with watch, torch.set_grad_enabled(torch.is_grad_enabled()):
                result = call(self.model)
        except LeftAtCut:
            return tuple(self._leaving(watch, number) for number in leaving)
        finally:
            self._watch, self._received = None, ()
            if rehearsal.recomputed:
                self._filled[watch.serial] = watch.filled
        if not self.is_last:
            raise another_path(f"did not come to {self._parts[self.end]}")
        result = watch.fill(result)
        if any(map(is_fake, tensors_of(result))):
            raise leaked("the result")
        return result

    def _leaving(self, watch: Watch, number: int) -> torch.Tensor:
        """A value that crosses to the next stage; it has to be what that stage expects."""
        value, tensor = self.rehearsal.values[number], watch.filled.get(number, watch.kept.get(number))
        if tensor is None:
            raise another_path(f"did not make all values that cross to {self._parts[self.end]}")
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise UserError(
                f"a value that crosses to {self._parts[self.end]} is {tensor.dtype} {tuple(tensor.shape)}, and was "
                f"{value.dtype} {tuple(value.shape)} for a batch of the same shapes",
                "cut samples to length in the collate function, not in the loss or the model by a value of the batch",
            )
        if value.requires_grad and not tensor.requires_grad:
            raise another_path("computed without gradients")
        return tensor

    def _skipping(self, number: int, forward: Forward) -> Forward:
        def skipped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._watch is None:
                return forward(module, *args, **kwargs)
            return self.rehearsal.fresh(self.rehearsal.outputs[number])

        return skipped

    def _part_call(self, number: int) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            if watch is None:
                args, kwargs = self._as_before(args, kwargs)
                return call_of(module)(*args, **kwargs)
            with watch.paused():
                if watch.at != number - 1:
                    raise another_path(f"called {self._parts[number]} after {self._parts[watch.at]}")
                if number == self.end:
                    raise LeftAtCut
                watch.at = number
                if number < self.first:  # its hooks run, and may keep what the part returns
                    output = call_of(module)(*args, **kwargs)
                else:
                    output = self._compute(watch, number, module, args, kwargs)
                for tensor in tensors_of(output):
                    watch.number(tensor)
                return output

        return called

    def _as_before(self, args: Any, kwargs: Any) -> Any:
        """The arguments of a call that torch.utils.checkpoint repeats: received values in the place they had before."""

        def received(tensor: torch.Tensor) -> torch.Tensor:
            serial, number = getattr(tensor, "_lockstep_number", (-1, -1))
            return self._filled.get(serial, {}).get(number, tensor)

        return map_tensors(received, (args, kwargs)) if self._filled else (args, kwargs)

    def _enter(self, watch: Watch) -> None:
        """The stage begins: the values that cross the cut are there."""
        if watch.count != self.rehearsal.counts[self.first]:
            raise another_path(f"made other values before {self._parts[self.first]}")
        watch.replayed = None
        numbers = self.rehearsal.crossing(self.first)
        values = self.rehearsal.values
        watch.filled = {
            # What is received is a leaf of autograd, which nobody may change in place.
            number: tensor.clone() if values[number].changed >= self.first else tensor
            for number, tensor in zip(numbers, self._received, strict=True)
        }

    def _compute(self, watch: Watch, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if number == self.first and not self.is_first:
            self._enter(watch)
        if watch.filled:
            args, kwargs = watch.fill((args, kwargs))
        output = apart_from(call_of(module)(*args, **kwargs), list(tensors_of((args, kwargs))))
        if any(map(is_fake, tensors_of(output))):
            raise leaked(self._parts[number])
        return output


def stage_model(
    model: nn.Module,
    owned: Collection[str],
    owned_buffers: Collection[str],
    device: torch.device,
    taken: dict[int, nn.Parameter],
    taken_buffers: dict[int, torch.Tensor],
) -> nn.Module:
    """A copy of a model that holds only the parameters and buffers it owns; the others have no data.

    Parameters of a model in memory are taken over, moved to the device; `taken` remembers them, for other stages of
    this rank that own them too, and `taken_buffers` the buffers. Parameters without storage (on the meta device) get
    uninitialised memory.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name not in owned:
            memo[id(parameter)] = nn.Parameter(fake_like(parameter, mode, device), parameter.requires_grad)
        elif id(parameter) in taken:
            memo[id(parameter)] = taken[id(parameter)]
        else:
            data = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
            taken[id(parameter)] = memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if name not in owned_buffers:
            memo[id(buffer)] = fake_like(buffer, mode, device)
        else:
            memo[id(buffer)] = taken_buffers.setdefault(id(buffer), buffer.detach().to(device, copy=True))
    return copy_of(model, memo)


def skeleton_of(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a model without any parameter data, to see what its forward does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter, mode, device), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if buffer.is_meta else buffer.detach().to(device, copy=True)
    return copy_of(model, memo)


def copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a model that takes what `memo` says for its parameters and buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES:
                for stray in tensors_of(value):
                    if not stray.is_leaf:  # kept from a forward, to be looked at
                        memo[id(stray)] = stray.detach()
    twin: nn.Module = copy.deepcopy(model, memo)
    for module in twin.modules():
        for name in HOOKS:
            hooks = vars(module).get(name, {})
            hooks.update({key: _of_twin(hook, memo) for key, hook in hooks.items()})
    return twin


def _of_twin(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook of a copy. A function inside of a method has its `self`, and would keep things in the model before."""
    if not isinstance(hook, FunctionType) or hook.__closure__ is None:
        return hook
    cells = []
    for cell in hook.__closure__:
        try:
            cells.append(CellType(memo.get(id(cell.cell_contents), cell.cell_contents)))
        except ValueError:  # nothing is in it yet
            cells.append(cell)
    twin = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, tuple(cells))
    twin.__kwdefaults__ = hook.__kwdefaults__
    return twin
