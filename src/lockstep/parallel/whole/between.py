"""Between steps a script has the whole model on any layout: how it is gathered, and how changes are kept.

Every rank has to read the same, since ranks gather from each other. The first reading after a step is a meeting, in
which a rank that waits for others learns that they have gone on without.
"""

from __future__ import annotations

import time
from collections import UserDict, defaultdict
from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.follow.trees import PLAIN
from lockstep.parallel.cut_model import CutModel
from lockstep.parallel.held import gather_whole, hold_value, take_part
from lockstep.parallel.whole.shown import Showing, Shown, Source, whole_twin
from lockstep.runtime.comm import Comm
from lockstep.runtime.dtensors import local_part

SECONDS_BETWEEN_LOOKS = 0.02


class BetweenSteps:
    """The whole tensors of a cut model and its optimizer.

    Copies are made of the model without data (`cut.skeleton`); there is none where every rank has the whole model, and
    only its optimizer works on parts (zero1).
    """

    def __init__(
        self, cut: CutModel, optimizer: torch.optim.Optimizer, comm: Comm, showing: Showing, step: int
    ) -> None:
        self._cut = cut
        self._optimizer = optimizer
        self._comm = comm
        self._showing = showing
        self._step = step  # that is done
        self._notices = comm.notices("between")
        self._met_after = -1
        model = cut.models[0]
        self._in_model: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._stored = {name: held.stored for name, held in cut.held.items() if held.stored is not None}
        self._sources = {name: self._source(name, one) for name, one in self._in_model.items() if self._is_cut(name)}
        if cut.skeleton is not None:
            matrices = [name for name, held in cut.held.items() if held.is_cut_over("tp")]
            showing.install(model, list(self._sources.values()), matrices, self._twin)
        self.seen = {one: name for name, one in model.named_parameters() if one is not self._stored.get(name)}
        """The names of the parameters that a script sees and the optimizer does not know."""
        self._elsewhere: dict[str, Any] = {}
        self._told_after = -1
        optimizer.register_load_state_dict_post_hook(lambda _: self.watch_state())
        self.gone_on(step)

    def gone_on(self, step: int) -> None:
        """This rank begins a step, and reads no more until it is done."""
        self._step = step
        self.watch_state()
        self._notices.post(f"at/{self._comm.rank}", str(step))

    def read(self, name: str) -> torch.Tensor:
        """A copy of the whole of a parameter or buffer, on every rank."""
        self._meet()
        source = self._sources[name]
        return self._gathered(name, self._stored.get(name), source.shape, source.held.dtype)

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of the whole gradient of the last step."""
        self._meet()
        stored = self._stored.get(name)
        own = None if stored is None else stored.grad
        with_one = self._comm.sum([float(own is not None)])[0]
        source = self._sources[name]
        return self._gathered(name, own, source.shape, source.held.dtype) if with_one else None

    @torch.no_grad()
    def write(self, name: str, whole: torch.Tensor) -> None:
        """Keep this rank's part of a whole tensor."""
        stored = self._stored.get(name)
        if stored is None:
            return
        with self._showing.hidden():
            self._cut.gradients.rest()
            self._put(name, whole, stored.data)
            self._cut.gradients.restored()

    def home_of_state(self, name: str) -> tuple[Any, Any]:
        """The dict that has what an optimizer keeps for a parameter, and the key in it."""
        if self._cut.pipeline is not None and self._told_after != self._step:
            self._told_after = self._step
            self._elsewhere = defaultdict(dict, self._state_elsewhere())
        stored = self._stored.get(name)
        return (self._elsewhere, name) if stored is None else (self._optimizer.state, stored)

    def shown_state(self, name: str, key: str, value: Any) -> Any:
        """What a script sees of a value that the optimizer keeps for a parameter: the whole, where ranks have parts."""
        is_part = self._is_part(name, value)
        if not (is_part or (self._cut.pipeline is not None and isinstance(value, torch.Tensor))):
            return value
        own = value if name in self._stored else None

        def read() -> torch.Tensor:
            self._meet()
            return self._gathered(name, own, value.shape, value.dtype)

        def write(whole: torch.Tensor) -> None:
            if is_part:
                self._put(name, whole, value)
            elif own is not None:
                own.copy_(whole)

        source = Source(_label(name, key), tuple(value.shape), value, read, write, lambda: None)
        return Shown(source, torch.empty(value.shape, dtype=value.dtype, device="meta"))

    def kept_state(self, name: str, key: str, value: Any) -> Any:
        """What this rank keeps of a value that a script gives to the optimizer."""
        if isinstance(value, Shown):
            is_itself = not value.views and value.source.name == _label(name, key)
            value = value.source.held if is_itself else value.whole()
        stored = self._stored.get(name)
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if not (is_plain and isinstance(stored, DTensor) and value.shape == stored.shape):
            return value
        part = torch.zeros_like(stored.data, dtype=value.dtype)
        self._put(name, value.detach(), part)
        return part

    def watch_state(self) -> None:
        """Let the optimizer's state know what a script sees; a new one may have been put there."""
        optimizer = self._optimizer
        if self.seen and not isinstance(optimizer.state, SeenState):
            self.forget_state()
            old, optimizer.state = optimizer.state, SeenState(self)
            optimizer.state.update(old)

    def forget_state(self) -> None:
        """What other stages have told of their optimizers is not so any more."""
        self._told_after = -1

    def _state_elsewhere(self) -> dict[str, dict[str, Any]]:
        """What is kept for parameters that only other stages have: of tensors, something of that shape."""
        self._meet()
        cut, state = self._cut, self._optimizer.state
        at = cut.layout.coordinate(cut.rank)
        speaks = all(place == 0 for axis, place in at.items() if axis != "pp")
        own = {
            name: {key: _described(value) for key, value in state[stored].items()}
            for name, stored in cut.parameters
            if speaks and cut.held[name].is_first and stored in state
        }
        device = self._in_model[next(iter(self._in_model))].device

        def stand_in(value: Any, shape: list[int] | None, dtype: str) -> Any:
            if shape is None:
                return value
            return torch.zeros((), dtype=getattr(torch, dtype), device=device).expand(shape)

        return {
            name: {key: stand_in(*one) for key, one in values.items()}
            for some in self._comm.gather(own)
            for name, values in some.items()
            if name not in self._stored
        }

    def _is_part(self, name: str, value: Any) -> bool:
        """Whether something that the optimizer keeps is cut like its parameter."""
        stored = self._stored.get(name)
        return isinstance(value, DTensor) and stored is not None and value.shape == stored.shape

    @torch.no_grad()
    def _put(self, name: str, whole: torch.Tensor, target: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor into one that is cut as its parameter is stored."""
        local_part(target).copy_(take_part(self._cut.held[name], whole, target))

    def _is_cut(self, name: str) -> bool:
        """Whether ranks have to gather a tensor; they all say the same."""
        held, in_model = self._cut.held[name], self._in_model[name]
        if self._cut.pipeline is not None:
            is_everywhere = len(set(held.places)) == self._cut.layout.pp
            return isinstance(in_model, nn.Parameter) or not is_everywhere
        return bool(hold_value(held, in_model).cuts)

    def _source(self, name: str, in_model: torch.Tensor) -> Source:
        calls = (partial(self.read, name), partial(self.write, name), partial(self.gradient, name))
        return Source(name, self._cut.held[name].shape, in_model, *calls)

    @torch.no_grad()
    def _gathered(self, name: str, own: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        held, whole = self._cut.held[name], None
        with self._showing.hidden():
            self._cut.gradients.rest()
            if own is not None:
                whole = gather_whole(held, own.detach()).clone(memory_format=torch.contiguous_format)
        if self._cut.pipeline is None:
            assert whole is not None
            return whole
        first = self._comm.pipeline_ranks()[held.places[0]]
        if whole is None:
            whole = torch.empty(shape, dtype=dtype, device=self._in_model[name].device)
        dist.broadcast(whole, first, group=self._comm.group("pp"))
        return whole

    def _twin(self) -> nn.Module:
        def value(name: str) -> torch.Tensor:
            return self.read(name) if name in self._sources else self._in_model[name].detach().clone()

        assert self._cut.skeleton is not None
        with self._showing.hidden():
            return whole_twin(self._cut.skeleton, self._cut.models[0], value)

    def _meet(self) -> None:
        """Before the first reading after a step: wait for the others, unless one has gone on to the next step."""
        step = self._step
        if self._met_after == step:
            return
        mine = f"reads/{step}/{self._comm.rank}"
        self._comm.beat.at("reading the whole model between steps, which every rank has to do")
        self._notices.post(mine, "")
        while not self._notices.has(*(f"reads/{step}/{rank}" for rank in range(self._comm.world_size))):
            for rank in range(self._comm.world_size):
                at = self._notices.wait([f"at/{rank}"])[0] if self._notices.has(f"at/{rank}") else "0"
                if int(at) > step and not self._notices.has(f"reads/{step}/{rank}"):
                    raise UserError(
                        f"rank {self._comm.rank} reads the model's parameters after step {step}, and rank {rank} has "
                        "gone on without",
                        "read them on every rank, not under `if run.is_main`: ranks gather them from each other",
                    )
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._notices.take_down([f"reads/{self._met_after}/{self._comm.rank}"])
        self._met_after = step


class SeenState(defaultdict[Any, Any]):
    """The state of an optimizer, which keeps it by stored parameters, for one who asks by those that a script sees."""

    def __init__(self, between: BetweenSteps) -> None:
        super().__init__(dict)
        self._between, self._seen = between, between.seen

    def __getitem__(self, key: Any) -> Any:
        if (name := self._seen.get(key)) is None:
            return super().__getitem__(key)
        home, own = self._between.home_of_state(name)
        return _Kept(self._between, name, home[own])

    def __setitem__(self, key: Any, value: Any) -> None:
        if (name := self._seen.get(key)) is None:
            super().__setitem__(key, value)
        else:
            kept = _Kept(self._between, name, {})
            kept.update(value)
            home, own = self._between.home_of_state(name)
            home[own] = kept.data

    def __delitem__(self, key: Any) -> None:
        if (name := self._seen.get(key)) is None:
            super().__delitem__(key)
        else:
            home, own = self._between.home_of_state(name)
            del home[own]

    def __contains__(self, key: Any) -> bool:
        if (name := self._seen.get(key)) is None:
            return super().__contains__(key)
        home, own = self._between.home_of_state(name)
        return own in home

    # By the above, which a dict's own do not ask.
    get = MutableMapping.get  # type: ignore[assignment]
    pop = MutableMapping.pop
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def clear(self) -> None:
        super().clear()
        self._between.forget_state()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


class _Kept(UserDict[str, Any]):
    """What an optimizer keeps for one parameter, as one device has it."""

    def __init__(self, between: BetweenSteps, name: str, values: dict[str, Any]) -> None:
        super().__init__()
        self.data = values
        self._between, self._name = between, name

    def __getitem__(self, key: str) -> Any:
        return self._between.shown_state(self._name, key, self.data[key])

    def __setitem__(self, key: str, value: Any) -> None:
        self.data[key] = self._between.kept_state(self._name, key, value)


def _label(name: str, key: str) -> str:
    return f"the optimizer's {key} of {name}"


def _described(value: Any) -> tuple[Any, Sequence[int] | None, str]:
    if isinstance(value, torch.Tensor):
        return None, tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return value if isinstance(value, PLAIN) else None, None, ""
