"""Random draws of a training forward that belong to the samples, not to those who share the forward.

A draw that has the batch as a dim (dropout, noise, masks) is made row by row: each sample's part comes from the
sample's own stream, as if it went through the forward alone. So a step draws the same numbers however it is cut into
micro-batches. A draw without one (a coin for the whole batch) comes from the step's stream, which every micro-batch
begins anew: as if the step were one forward.

A forward that is computed again in the backward pass (activation recompute, `torch.utils.checkpoint`) finds its draws
by the state of torch's own generator, which those who compute again put back. A backward pass leaves the function mode,
so `in_backward_of` sees them below autograd.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lockstep.errors import UserError
from lockstep.runtime.seeds import is_computed_again
from lockstep.runtime.torch_private import (
    DIRICHLET,
    DIRICHLET_OPERATION,
    GAMMA,
    GAMMA_OPERATION,
    RECURRENT,
    FakeTensor,
    TorchDispatchMode,
    in_backward,
)

RANDOM = frozenset(
    [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu]
    + [F.gumbel_softmax, torch.dropout, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson]
    + [torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like]
    + [getattr(torch.Tensor, name) for name in ("bernoulli", "bernoulli_", "normal_", "uniform_", "exponential_")]
    + [getattr(torch.Tensor, name) for name in ("random_", "log_normal_", "geometric_", "cauchy_", "multinomial")]
    + [GAMMA, torch.rrelu]
)
"""Functions that draw random numbers."""

ALSO_DRAW = frozenset(
    (
        *(F.scaled_dot_product_attention, F.multi_head_attention_forward),
        *RECURRENT,
        *(torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.native_dropout),
        *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_, torch.rrelu_),
        *(DIRICHLET, torch.binomial),
    )
)
"""Functions that draw where they are told to drop something, and rarer ones."""

aten = torch.ops.aten
IN_PLACE = frozenset(
    (
        *(aten.bernoulli_, aten.normal_, aten.uniform_, aten.exponential_, aten.random_, aten.log_normal_),
        *(aten.geometric_, aten.cauchy_),
    )
)
NEW = frozenset(
    (
        *(aten.rand, aten.randn, aten.randint, aten.rand_like, aten.randn_like, aten.randint_like, aten.normal),
        *(aten.bernoulli, aten.native_dropout, aten.multinomial, aten.poisson, aten.rrelu_with_noise),
        *(GAMMA_OPERATION, DIRICHLET_OPERATION, aten.binomial),
    )
)
"""What drawing functions come down to: operations that fill a tensor, and those that make one."""


FORWARD, SCORING = (-1, 0), (-2, 0)
"""Where draws are that come before any module with streams of its own, as `call`."""
FLAT, WHOLE = -1, -2
"""In the place of a dim: the first one has several rows of every sample, and: the draw is one for all samples."""


_Draw = tuple[int, int, int, int]
"""A module and how often it was called, which of its draws it is, and how many dims that has."""


class SampleDraws(TorchFunctionMode):
    """While it is entered, draws follow the samples of the micro-batch that was begun last.

    `micro_batch` is its number in the step, `positions` are the places there of its samples. `has_drawn` says whether
    anything was drawn, `has_drawn_for_all` whether that was one draw for all samples of the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = self.has_drawn_for_all = False
        self._below = _RowByRow(self)
        self.micro_batch = 0
        self.positions: Sequence[int] = ()
        self._seed_of: Callable[[int], int] = hash
        self._states: dict[torch.device, list[torch.Tensor | None]] = {}
        self._is_derived = False
        self._drawn: dict[tuple[int, bytes], _Streams] = {}
        self._positions: dict[int, Sequence[int]] = {}
        self._call = FORWARD
        self._draws_of_call = 0
        self._learns = False
        self._shapes: dict[_Draw, dict[int, tuple[int, ...]]] = {}
        self._learnt: dict[_Draw, int] = {}
        self._for_all: dict[_Draw, set[tuple[int, ...]]] = {}

    def begin(
        self, micro_batch: int, positions: Sequence[int], seed_of: Callable[[int], int], call: tuple[int, int] = FORWARD
    ) -> None:
        """A forward begins, of the samples in these places of their step; `seed_of(position)` begins a stream."""
        self.micro_batch = micro_batch
        self.positions = self._positions[micro_batch] = positions
        self.has_drawn_for_all = False
        self._is_derived = torch.is_grad_enabled()
        self.reseed(seed_of, call)

    def reseed(self, seed_of: Callable[[int], int], call: tuple[int, int]) -> None:
        """The samples' streams begin anew, in a module that has its own: its number, and how often it was called."""
        self._seed_of = seed_of
        self._states = {}
        self._call, self._draws_of_call = call, 0

    @contextmanager
    def learning(self) -> Iterator[None]:
        """While forwards of several numbers of samples are tried: learn which dim of every draw the samples are along.

        Else a draw of a layer's width would be taken for one of the samples where there are just as many of these. What
        is learnt counts at once. By a coin a forward may draw something else in the same place: what is one for all
        samples is so in its own shape only.
        """
        self._learns = True
        try:
            yield
        finally:
            self._learns = False
            self._shapes = {}

    def in_backward_of(self, micro_batch: int) -> AbstractContextManager[Any]:
        """Enter it around a backward pass, in which this micro-batch may be computed again."""
        self.micro_batch, self.positions = (
            micro_batch,
            self._positions[micro_batch],
        )  # a pipeline has begun others since
        return self._below if self._drawn else nullcontext()

    def forget(self) -> None:
        """Nothing that was drawn so far is computed again."""
        self._drawn.clear()
        self._positions.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in RANDOM and not (func in ALSO_DRAW and _drops(func, args, kwargs)):
            return func(*args, **kwargs)
        for kind in types:
            if "__torch_function__" in vars(kind) and kind is not torch.Tensor:
                with self:  # it draws for the whole of what it has a part of, by functions that come here again
                    return kind.__torch_function__(func, types, args, kwargs)
        tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        is_attention = func is F.scaled_dot_product_attention
        if is_attention and tensors[0].is_cuda and len(tensors[0]) == len(self.positions):
            return self._attention(tensors[0], args, kwargs)
        # In torch's own attention layer too the fused kernels of a GPU drop what nobody can tell them.
        is_fused = func is F.multi_head_attention_forward and tensors[0].is_cuda
        with sdpa_kernel(SDPBackend.MATH) if is_fused else nullcontext(), self._below:
            return func(*args, **kwargs)

    def row_by_row(
        self, shape: Sequence[int], device: torch.device, flat: bool, draw: Callable[[int, int, int], None]
    ) -> int | None:
        """Have `draw(dim, start, length)` draw each sample's part in its stream; returns the dim, None: there is none.

        With `flat` the first dim may be several rows of every sample.
        """
        self.has_drawn = True
        key = None
        if in_backward() or (self._is_derived and is_computed_again()):
            state = _generator(device).get_state()
            key = self.micro_batch, hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
        if in_backward() and key in self._drawn:
            self.positions, self._seed_of, before, dim = self._drawn[key]
            self._states = {kind: list(rows) for kind, rows in before.items()}
        else:
            dim = self._batch_dim(shape, flat)
            if key is not None:
                before = {kind: list(rows) for kind, rows in self._states.items()}
                self._drawn[key] = _Streams(self.positions, self._seed_of, before, dim)
        if dim is None:
            self.has_drawn_for_all = True
        else:
            samples = len(self.positions)
            length = shape[dim] // samples
            with self._streams(device) as in_stream:
                for row in range(samples):
                    with in_stream(row):
                        draw(dim, row * length, length)
        return dim

    def _batch_dim(self, shape: Sequence[int], flat: bool) -> int | None:
        """Which dim of this draw the samples are along; None: it is one for all of them."""
        samples = len(self.positions)
        this = *self._call, self._draws_of_call, len(shape)
        self._draws_of_call += 1
        if self._learns:
            self._learn(this, samples, tuple(shape))
        learnt = self._learnt.get(this)
        if tuple(shape) in self._for_all.get(this, ()):
            return None
        if learnt == FLAT:
            return 0 if flat and samples and shape[0] % samples == 0 else None
        if learnt is not None and len(shape) > learnt and shape[learnt] == samples:
            return learnt
        return _batch_dim(shape, samples, flat)

    def _learn(self, draw: _Draw, samples: int, shape: tuple[int, ...]) -> None:
        shapes = self._shapes.setdefault(draw, {})
        shapes[samples] = shape
        found = _followed_dim(shapes) if len(shapes) > 1 else None
        if found == WHOLE:
            self._for_all.setdefault(draw, set()).add(shape)
        elif found is not None:
            self._learnt[draw] = found

    def _attention(self, query: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Attention with dropout on a GPU, whose fused kernels draw inside: sample by sample."""
        if self._is_derived and is_computed_again():
            raise UserError(
                "attention with dropout on a GPU is computed again in the backward pass, where its kernels would draw "
                "another mask",
                "set the dropout of attention to 0, or do without recompute (gradient checkpointing)",
            )
        self.has_drawn = True
        found = []

        def own(value: Any, row: int) -> Any:
            is_batched = isinstance(value, torch.Tensor) and value.dim() == query.dim() and len(value) == len(query)
            return value[row : row + 1] if is_batched else value

        with self._streams(query.device) as in_stream:
            for row in range(len(query)):
                with in_stream(row):
                    mine = {key: own(value, row) for key, value in kwargs.items()}
                    found.append(F.scaled_dot_product_attention(*(own(value, row) for value in args), **mine))
        return torch.cat(found)

    @contextmanager
    def _streams(self, device: torch.device) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """Gives a function that puts a sample's stream into torch's generator; the step's comes back afterwards."""
        generator = _generator(device)
        device = generator.device  # "cuda" is one of "cuda:0", ...
        torch.empty((), device=device).uniform_()  # so that no two draws of a forward find the same state
        state = generator.get_state()
        rows = self._states.setdefault(device, [None] * len(self.positions))

        @contextmanager
        def in_stream(row: int) -> Iterator[None]:
            if (begun := rows[row]) is None:
                generator.manual_seed(self._seed_of(self.positions[row]))
            else:
                generator.set_state(begun)
            yield
            rows[row] = generator.get_state()

        try:
            yield in_stream
        finally:
            generator.set_state(state)


class _Streams(NamedTuple):
    """Where the streams of a forward's samples stood before a draw, and which of its dims the samples are along."""

    positions: Sequence[int]
    seed_of: Callable[[int], int]
    states: dict[torch.device, list[torch.Tensor | None]]
    dim: int | None


class _RowByRow(TorchDispatchMode):
    """Below autograd: sees what a drawing function comes down to, and does it row by row."""

    def __init__(self, draws: SampleDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = func.overloadpacket
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        is_draw = kind in IN_PLACE or kind in NEW
        if not is_draw or kwargs.get("generator") is not None or is_fake:
            return func(*args, **kwargs)
        number, like = next((n, one) for n, one in enumerate(args) if isinstance(one, torch.Tensor | list | tuple))
        is_size = not isinstance(like, torch.Tensor)
        shape: Sequence[int] = like.shape if isinstance(like, torch.Tensor) else like
        found: list[Any] = []

        def draw(dim: int, start: int, length: int) -> None:
            def own(value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    return value
                part = value.narrow(dim, start, length)
                return part.contiguous() if dim else part  # what lies apart in memory is filled in another order

            mine = [own(value) for value in args]
            if is_size:
                mine[number] = [*shape[:dim], length, *shape[dim + 1 :]]
            found.append(func(*mine, **kwargs))

        device = like.device if isinstance(like, torch.Tensor) else torch.device(kwargs.get("device") or "cpu")
        dim = self._draws.row_by_row(shape, device, not is_size, draw)
        if dim is None:
            return func(*args, **kwargs)
        if kind in IN_PLACE:
            return like.copy_(torch.cat(found, dim)) if dim and isinstance(like, torch.Tensor) else like
        if isinstance(found[0], tuple):
            return tuple(torch.cat(parts, dim) for parts in zip(*found, strict=True))
        return torch.cat(found, dim)


def has_moved(device: torch.device, seed: int) -> bool:
    """Whether anybody drew from torch's generators since they were given a seed."""
    for generator in {_generator(device), torch.default_generator}:
        now = generator.get_state()
        if not torch.equal(now, generator.manual_seed(seed).get_state()):
            return True
    return False


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _followed_dim(shapes: Mapping[int, Sequence[int]]) -> int | None:
    """Which dim of a draw follows the number of samples, FLAT or WHOLE; None: its shapes by that number do not tell."""
    for dim in (0, 1):
        if all(len(shape) > dim and shape[dim] == samples for samples, shape in shapes.items()):
            return dim
    if len(set(shapes.values())) == 1:
        return WHOLE
    flat = all(shape and shape[0] and shape[0] % samples == 0 for samples, shape in shapes.items())
    return FLAT if flat else None


def _batch_dim(shape: Sequence[int], samples: int, flat: bool) -> int | None:
    """Which dim of a draw the samples seem to be along, where that was not learnt."""
    for dim in (0, 1):
        if samples and len(shape) > dim and shape[dim] == samples:
            return dim
    return 0 if flat and samples and shape and shape[0] and shape[0] % samples == 0 else None


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of `ALSO_DRAW` draws with these arguments."""
    if func is F.scaled_dot_product_attention:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    if func is F.multi_head_attention_forward:
        names = list(inspect.signature(func).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        return bool(given["dropout_p"] > 0 and given.get("training", True))
    return True
