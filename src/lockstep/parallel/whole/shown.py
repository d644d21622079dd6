"""What a script sees of a cut model between steps: parameters and buffers as one device has them.

A rank holds a part of a parameter (tp, fsdp) or nothing of it (pp). Between steps its place in the model is taken by a
`Shown`: a tensor of the whole shape that holds no data. What reads it gathers the whole, and what changes it keeps this
rank's part of the result. So it is always the parameter of now, and a list of parameters that was made before the
training stays right. Inside steps the model has what is stored: see `Showing.hidden`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.follow.around import Forward, replace_forward
from lockstep.follow.trees import PLAIN, map_tensors, tensors_of
from lockstep.parallel.pipeline.stage import copy_of
from lockstep.parallel.tensor.cut import along_of, whole_of
from lockstep.parallel.whole.alone import hook_refused
from lockstep.runtime.torch_private import (
    after_state_dict,
    call_of,
    hooks_after_loading,
    make_wrapper_subclass,
    mark_as_parameter,
    own_buffers,
    own_parameters,
    plain_torch_function,
    replace_call,
    replace_own_tensors,
    replaced_call,
    schema_of,
    tree_map_only,
)

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Source:
    """Where the whole of a tensor comes from and goes to; every rank calls `read` and `gradient`."""

    name: str
    shape: tuple[int, ...]
    held: torch.Tensor
    """What stands in the model on this rank: a part, or something without data."""
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], None]
    """Keeps this rank's part of a whole."""
    gradient: Callable[[], torch.Tensor | None]


class Shown(torch.Tensor):
    """A parameter or buffer of the whole model, or a view of it, whatever this rank holds of it."""

    source: Source
    views: tuple[Change, ...]

    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Source, like: torch.Tensor, views: tuple[Change, ...] = ()) -> Shown:
        """A view of a source's tensor that looks `like` another tensor."""
        shown: Shown = make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=source.held.device,
            requires_grad=like.requires_grad,
        )
        shown.source, shown.views = source, views
        if not views and isinstance(source.held, nn.Parameter):
            mark_as_parameter(shown)
        return shown

    def register_hook(self, hook: Any) -> Any:  # noqa: ARG002 - no gradient ever comes here
        """Refused: what a step derives by is what is stored."""
        raise hook_refused(f"the parameter {self.source.name} has a hook on its gradient")

    register_post_accumulate_grad_hook = register_hook

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do it with whole tensors, and keep what was changed of them."""
        kwargs = kwargs or {}
        wholes: dict[str, torch.Tensor] = {}

        def as_plain(shown: Shown) -> torch.Tensor:
            if shown.source.name not in wholes:
                wholes[shown.source.name] = shown.source.read()
            return _seen(wholes[shown.source.name], shown.views)

        plain_args, plain_kwargs = tree_map_only(Shown, as_plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        changed = _changed_by(func, args, kwargs)
        for source in {shown.source.name: shown.source for shown in changed}.values():
            source.write(wholes[source.name])
        if changed:
            return args[0] if isinstance(args[0], Shown) and isinstance(result, torch.Tensor) else result
        if func.is_view and args and isinstance(args[0], Shown):
            return _views_of(args[0], func, plain_args[1:], plain_kwargs, result)
        return result

    def whole(self) -> torch.Tensor:
        """A copy of what it shows, as a plain tensor; every rank calls it."""
        return _seen(self.source.read(), self.views)

    @property
    def requires_grad(self) -> bool:
        return not self.views and self.source.held.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.source.held.requires_grad_(value)
        torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool = True) -> Shown:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """A copy of the whole gradient of the last step; every rank asks."""
        return None if self.views else self.source.gradient()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise UserError(
                f"the gradient of {self.source.name} was set between steps, and no step would use it",
                "leave gradients to engine.step",
            )

    @property
    def data(self) -> torch.Tensor:
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if self.views or (value.shape, value.dtype) != (self.shape, self.dtype):
            raise UserError(
                f"{self.source.name} is {self.dtype} {tuple(self.shape)}, and was given {value.dtype} "
                f"{tuple(value.shape)} between steps",
                "keep shape and number format; formats are chosen by precision and numerics of run.setup",
            )
        self.source.write(value.whole() if isinstance(value, Shown) else value.detach().to(self.device))

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, which cannot be changed: nobody would see it."""
        array = self.whole().numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def data_ptr(self) -> int:
        raise UserError(
            f"no rank has the whole of {self.source.name} in memory, where a data_ptr could lead",
            "use a copy (.clone()), or compare names",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        # Without its numbers: a single rank may print it.
        return f"{self.source.name} of shape {tuple(self.shape)}, {self.dtype}, gathered where it is read"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        plain = self.whole()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


class Showing:
    """Whether a model shows whole tensors now."""

    def __init__(self) -> None:
        self.is_hidden = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, the model is what this rank computes with."""
        before, self.is_hidden = self.is_hidden, True
        try:
            yield
        finally:
            self.is_hidden = before

    def install(
        self, model: nn.Module, sources: Sequence[Source], slices: Collection[str], twin: Callable[[], nn.Module]
    ) -> None:
        """From now on a model shows whole tensors outside of `hidden`; a deep copy of it is what `twin` returns.

        Modules that have parameters in `slices` have a forward that was made for parts.
        """
        shown: dict[int, Shown] = {}
        for source in sources:
            like = torch.empty(source.shape, dtype=source.held.dtype, device="meta")
            trains = source.held.requires_grad
            shown[id(source.held)] = Shown(source, like.requires_grad_() if trains else like)
        for module in model.modules():
            named = {**own_parameters(module), **own_buffers(module)}
            own = {name: shown[id(one)] for name, one in named.items() if id(one) in shown}
            if own:
                parameters, buffers = own_parameters(module), own_buffers(module)
                replace_own_tensors(module, _Dict(parameters, own, self), _Dict(buffers, own, self))
                after_state_dict(module, _make_plain)
                hooks = hooks_after_loading(module)
                hooks.update({key: self._hiding(hook) for key, hook in hooks.items()})
            if any(one.source.name in slices for one in own.values()):
                replace_forward(module, self._plain_between_steps)
        replace_call(model, self._calling(model))
        vars(model)["__deepcopy__"] = lambda _: twin()

    def _plain_between_steps(self, forward: Forward) -> Forward:
        """What a module with a forward made for parts does: between steps what its class does, with whole tensors."""

        def either(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            shows = not self.is_hidden and any(isinstance(one, Shown) for one in own_parameters(module).values())
            return (type(module).forward if shows else forward)(module, *args, **kwargs)

        return either

    def _hiding(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def hidden(*args: Any) -> Any:
            with self.hidden():
                return hook(*args)

        return hidden

    def _calling(self, model: nn.Module) -> Callable[..., Any]:
        before = replaced_call(model)

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = before or call_of(module)
            if self.is_hidden:
                return call(*args, **kwargs)
            with self.hidden():
                result = call(*args, **kwargs)
            return map_tensors(whole_of, result) if any(map(along_of, tensors_of(result))) else result

        return called


class _Dict(dict[str, Any]):
    """The parameters or buffers of a module, by which everything of torch's reads them."""

    def __init__(self, values: Mapping[str, Any], shown: Mapping[str, Shown], showing: Showing) -> None:
        super().__init__(values)
        self._shown = shown
        self._showing = showing

    def _seen(self, name: str, value: Any) -> Any:
        """What stands in for a value; nothing for one that has taken the place of that which was set up.

        A sharded parameter gives its place to a gathered copy now and then, which changes would be lost with.
        """
        shown = None if self._showing.is_hidden else self._shown.get(name)
        if shown is None or not (value is shown.source.held or isinstance(shown.source.held.data, DTensor)):
            return value
        return shown

    def __getitem__(self, name: str) -> Any:
        return self._seen(name, super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not self._shown.get(name, self):  # `layer.weight *= 0.9` assigns what is shown to its own place
            super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._seen(name, super().get(name, default))

    def values(self) -> Any:
        return [self._seen(name, value) for name, value in super().items()]

    def items(self) -> Any:
        return [(name, self._seen(name, value)) for name, value in super().items()]

    def __deepcopy__(self, _: Any) -> Any:
        raise UserError(
            "a part of the model was to be copied, and this layout can copy only the whole",
            "take the part from a copy of the whole: copy.deepcopy(engine.model).NAME",
        )


def whole_twin(skeleton: nn.Module, model: nn.Module, read: Callable[[str], torch.Tensor]) -> nn.Module:
    """An ordinary model with the values of now, from one without data; `read(name)` gives the whole of a tensor."""
    memo: dict[int, Any] = {}
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in skeleton.named_parameters():
        memo[id(parameter)] = nn.Parameter(read(name), requires_grad=trained[name])
    for name, buffer in skeleton.named_buffers():
        memo[id(buffer)] = read(name)
    twin = copy_of(skeleton, memo)
    known = dict(model.named_modules())
    for name, module in twin.named_modules():
        if name in known:  # modes and flags as they are now
            vars(module).update({key: value for key, value in vars(known[name]).items() if isinstance(value, PLAIN)})
    return twin


def _seen(whole: torch.Tensor, views: Sequence[Change]) -> torch.Tensor:
    for view in views:
        whole = view(whole)
    return whole


def _views_of(shown: Shown, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """What a view function returns for a shown tensor: shown tensors too, so that changing them changes the first."""

    def again(whole: torch.Tensor) -> Any:
        return func(whole, *args, **kwargs)

    if isinstance(result, torch.Tensor):
        return Shown(shown.source, result, (*shown.views, again))
    numbered = (partial(_one_of, again, number) for number in range(len(result)))
    return [Shown(shown.source, one, (*shown.views, view)) for one, view in zip(result, numbered, strict=True)]


def _one_of(function: Callable[[torch.Tensor], Any], number: int, whole: torch.Tensor) -> Any:
    return function(whole)[number]


def _changed_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Shown]:
    """The shown tensors among the arguments that a function writes to."""
    found: list[Shown] = []
    if schema_of(func).is_mutable:
        for number, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                found += [
                    one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Shown)
                ]
    return found


def _make_plain(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """A state_dict has plain tensors: every rank calls for it, and one alone may then write it to a file."""
    for key, value in state.items():
        if isinstance(value, Shown):
            state[key] = value.whole()
