"""Which matrices of a plain model can be cut over ranks: found by trying it out.

One forward runs on tensors without data. Every matrix that gets whole values is cut by columns, and what it returns is
followed through the user's code, operation by operation. A matrix it comes to is cut by rows. Where an operation needs
the whole, the matrices it came from stay whole, with that as the reason, and the forward runs again.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.follow.blocks import find_blocks
from lockstep.follow.trees import tensors_of
from lockstep.follow.values import is_fake, tensors_in, user_line
from lockstep.parallel.build.materialise import tied_names
from lockstep.parallel.tensor.cut import Along, CannotCutError, Following, Parts, along_axis, along_of, plain
from lockstep.parallel.tensor.dry_forward import refuse_reentrant, trying_out
from lockstep.parallel.tensor.modules import (
    Role,
    column,
    features,
    heads,
    is_linear,
    parameter_cuts,
    row,
    unfit_for_heads,
)
from lockstep.runtime.axis import Axis
from lockstep.runtime.torch_private import call_of, replace_call

SAID = "tensor.roles says so"

MOST_PARTS = 16
"""What is taken apart into more pieces than this has no parts that could be cut each."""

WORTH_CUTTING = 0.01
"""A table of embeddings that holds less than this share of a model stays whole."""

SMALL = 0.1
"""A matrix that holds less than this share of its block stays whole where it cannot be shared out evenly."""


@dataclass(frozen=True)
class TensorPlan:
    """How the matrices of a model are cut over ranks, and why the others are not."""

    roles: dict[str, Role]
    partners: dict[str, list[str]]
    """The matrices that take in what one returns."""
    whole: dict[str, str]
    """Why a matrix stays whole."""
    sizes: dict[str, list[tuple[int, str]]]
    """What the number of ranks has to divide, for each module."""
    sequence: bool
    """Whether what is between the matrices is cut by tokens."""
    why: str
    """Why it is, or is not."""

    def describe(self, tp: int) -> str:
        """For people: how much is cut, and what is not."""
        kinds = Counter(role.kind for role in self.roles.values())
        words = {"column": "by columns", "row": "by rows", "vocabulary": "by entries", "heads": "by heads"}
        cut = ", ".join(f"{count} {words[kind]}" for kind, count in kinds.items())
        alike = Counter(map(starred, self.whole))
        whole = ", ".join(list(alike)[:3]) + (" and others" if len(alike) > 3 else "")
        return f"tp={tp} cuts matrices: {cut}{f'; whole on every rank: {whole}' if whole else ''}"


@dataclass
class Trial:
    """One forward with some modules cut, and what is learnt from it."""

    names: dict[int, str]
    roles: dict[str, Role] = field(default_factory=dict)
    partners: dict[str, list[str]] = field(default_factory=dict)
    sizes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    """Modules whose parameters are used elsewhere, and where."""
    inside: int = 0

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def name_of(self, module: nn.Module) -> str:
        """What a module is called."""
        return self.names[id(module)]

    def cannot(self, along: Sequence[Along], reason: str, parts: Parts | None) -> None:
        """An operation needs the whole."""
        raise CannotCutError([one.origins for one in along], f"{reason} ({user_line()})", parts)

    def divides(self, along: Along, size: int, what: str) -> None:
        """The number of ranks has to divide this."""
        for origin in along.origins:
            self.must_divide(origin, size, what)

    def must_divide(self, name: str, size: int, what: str) -> None:
        """The number of ranks has to divide this, for a module."""
        known = self.sizes.setdefault(name, [])
        if (size, what) not in known:
            known.append((size, what))


class _Uses(Following):
    """Follows cuts, and sees parameters of candidates that are used elsewhere than in their modules' own forward."""

    def __init__(self, trial: Trial, owners: dict[int, str]) -> None:
        super().__init__()
        self._trial = trial
        self._owners = owners
        self.outside: dict[str, str] = {}

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As every cut is followed; notes parameters on the way."""
        if not self._trial.inside and not _only_asks(func):
            for value in tensors_in(args, kwargs):
                if id(value) in self._owners:
                    self.outside[self._owners[id(value)]] = user_line()
        return super().answer(func, args, kwargs)


def _only_asks(func: Any) -> bool:
    """Whether a function of a parameter is about its kind, which a part shares with the whole."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        asked = getattr(func.__self__, "__name__", "")
        return asked in ("dtype", "device", "requires_grad", "grad", "is_leaf", "layout", "ndim", "is_cuda", "is_meta")
    return name in ("dim", "is_floating_point", "is_complex", "element_size", "get_device")


def plan_tensor(
    skeleton: nn.Module,
    look: Callable[[nn.Module], Any],
    stated: Mapping[str, str],
    tp: int,
    borders: Sequence[str] = (),
    sequence: bool = False,
) -> TensorPlan:
    """Find the matrices of a model that `tp` ranks can share.

    `skeleton` is the model without data, `stated` are roles by patterns of names. What leaves a module of `borders` is
    whole. With `sequence`, what is between the matrices is cut by tokens where that is possible.
    """
    finder = _Finder(skeleton, look, stated, tp, borders)
    plan = finder.find()
    if sequence and not borders:
        plan = finder.with_sequence(plan)
    elif sequence:
        plan = replace(plan, why="what crosses from stage to stage of a pipeline is whole")
    blocks = [name for name, _ in find_blocks(skeleton)]
    if not plan.roles or (blocks and not any(owner_of(name, blocks) for name in plan.roles)):
        why = "; ".join(f"{name}: {reason}" for name, reason in list(plan.whole.items())[:3])
        raise UserError(
            f"tp={tp} would cut nothing {'in the blocks of this model' if blocks else 'of this model'}"
            f"{f' ({why})' if why else ''}",
            "use a dp, fsdp or pp layout for it",
        )
    return plan


def most_ranks(skeleton: nn.Module, look: Callable[[nn.Module], Any]) -> int:
    """What a tp axis has to divide in the blocks of a model, 0 where it could cut nothing."""
    try:
        plan = plan_tensor(skeleton, look, {}, 1)
    except UserError:
        return 0
    return math.gcd(*(size for sizes in plan.sizes.values() for size, what in sizes if what == "heads")) or math.gcd(
        *(size for name, sizes in plan.sizes.items() for size, _ in sizes if name in plan.partners)
    )


class _Finder:
    def __init__(
        self,
        model: nn.Module,
        look: Callable[[nn.Module], Any],
        stated: Mapping[str, str],
        tp: int,
        borders: Sequence[str],
    ) -> None:
        self._model = model
        self._look = look
        self._tp = tp
        self._borders = [model.get_submodule(name) for name in borders]
        self._blocks = [name for name, _ in find_blocks(model)]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._candidates = {
            name: module
            for name, module in model.named_modules()
            if is_linear(module) or isinstance(module, nn.MultiheadAttention | nn.Embedding)
        }
        inner = {id(child) for m in self._candidates.values() for child in m.modules() if child is not m}
        self._candidates = {name: m for name, m in self._candidates.items() if id(m) not in inner}
        self._whole: dict[str, str] = {}
        self._closed: set[str] = set()
        """Those that cannot be cut by rows either."""
        self._parts: dict[str, Parts] = {}
        self._tried: dict[str, set[Parts]] = {}
        self._stated = self._stated_roles(stated)
        self._hints = _own_plan(model, self._candidates)
        for name in self._candidates:
            if borders and owner_of(name, borders) is None:
                self._whole[name] = "it is outside of the parts of the pipeline"
            elif self._hints and self._is_inside(name) and name not in self._hints and name not in self._stated:
                self._whole[name] = "the model's own plan leaves it whole"
        for name, kind in self._stated.items():
            if kind == "whole":
                self._whole[name] = SAID
        for name, module in self._candidates.items():
            if reason := _unfit(module):
                self._whole[name] = reason

    def find(self) -> TensorPlan:
        """Try until a forward goes through."""
        for _ in range(6 * len(self._candidates) + 10):
            trial = Trial(self._names)
            try:
                self._run(trial)
                self._settle_tables(trial)
                self._settle_ties(trial)
                self._settle_sizes(trial)
            except CannotCutError as found:
                self._learn(found)
                continue
            whole = {name: why for name, why in self._whole.items() if name not in trial.roles}
            return TensorPlan(
                trial.roles, trial.partners, whole, trial.sizes, False, "tensor.sequence is off, or auto on CPUs"
            )
        raise AssertionError("every failed trial leaves one matrix more whole")

    def with_sequence(self, plan: TensorPlan) -> TensorPlan:
        """The same plan with tokens cut between the matrices, if a forward goes through so."""
        trial = Trial(self._names)
        try:
            self._run(trial, sequence=True)
        except CannotCutError as found:
            return replace(plan, why=found.reason)
        same = all(plan.roles.get(name) == role for name, role in trial.roles.items())
        return replace(plan, sequence=same, why="" if same else "other matrices could be cut then")

    def _is_inside(self, name: str) -> bool:
        """Whether a module is in a block."""
        return owner_of(name, self._blocks) is not None

    def _is_small(self, name: str) -> bool:
        """Whether a matrix is a small part of its block, such as an update of low rank (LoRA)."""
        block = self._model.get_submodule(owner_of(name, self._blocks) or "")
        own, all_ = (sum(p.numel() for p in one.parameters()) for one in (self._candidates[name], block))
        return own < SMALL * all_

    def _stated_roles(self, stated: Mapping[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for pattern, kind in stated.items():
            matching = [name for name in self._candidates if fnmatch.fnmatchcase(name, pattern)]
            if not matching:
                raise UserError(
                    f"tensor.roles names {pattern!r}, and the model has no matrix of that name",
                    f"name modules such as {', '.join(list(self._candidates)[:3])}; * stands for anything",
                )
            found |= dict.fromkeys(matching, kind)
        return found

    def _learn(self, found: CannotCutError) -> None:
        groups = [origins for origins in found.origins if origins]
        if not groups:
            raise UserError(f"this model cannot be cut for tp={self._tp}: {found.reason}", "use another layout")
        # Of two that do not go together the smaller stays whole: one key for many heads, say.
        blamed = min(groups, key=lambda names: sum(self._returns(name) for name in names))
        parts = found.parts if len(blamed) == 1 else None
        for name in sorted(blamed):
            if parts is not None and self._try_parts(name, parts):
                continue
            if self._stated.get(name) in ("column", "row"):
                raise UserError(
                    f"tensor.roles makes {name} a {self._stated[name]}, and it cannot be cut: {found.reason}",
                    "leave it out of tensor.roles, or say whole",
                )
            for alike in [name] if found.stated else self._alike(name):
                self._whole.setdefault(alike, found.reason)

    def _try_parts(self, name: str, sizes: Parts) -> bool:
        """Whether it is worth a try to cut each part of what a matrix returns: it is taken apart into such sizes."""
        returns = self._returns(name)
        parts = tuple(size * returns // sum(sizes) for size in sizes)
        tried = self._tried.setdefault(name, set())
        fits = sum(parts) == returns and min(parts) > 1 and len(parts) <= MOST_PARTS
        if not fits or parts in tried or isinstance(self._candidates[name], nn.MultiheadAttention):
            return False
        for alike in self._alike(name):
            self._tried.setdefault(alike, set()).add(parts)
            self._parts[alike] = parts
        return True

    def _alike(self, name: str) -> list[str]:
        """The same matrix in every block of a list: what is learnt of one need not be tried out for each."""
        block = owner_of(name, self._blocks)
        if block is None:
            return [name]
        siblings = [one for one in self._blocks if one.rpartition(".")[0] == block.rpartition(".")[0]]
        others = [one + name.removeprefix(block) for one in siblings]
        return [one for one in others if one in self._candidates and self._returns(one) == self._returns(name)]

    def _returns(self, name: str) -> int:
        module: Any = self._candidates[name]
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
        return int(features(module)[1] if is_linear(module) else len(module.weight))

    def _run(self, trial: Trial, sequence: bool = False) -> None:
        axis = Axis("tp", 1, 0, sequence=sequence, observer=trial)
        undo = []
        owners = {id(parameter): name for name, module in self._candidates.items() for parameter in module.parameters()}
        uses = _Uses(trial, owners)
        for name, module in self._candidates.items():
            undo.append(replace_call(module, self._called(trial, axis, name)))
        # What leaves the last part does not cross to another stage.
        handles = [border.register_forward_hook(_refuse_cut_results) for border in self._borders[:-1]]
        try:
            with trying_out(lambda: self._look(self._model), "tp"), uses:
                refuse_reentrant(self._look(self._model), "tp")
        finally:
            for one in reversed(undo):
                one()
            for handle in handles:
                handle.remove()
        trial.outside = uses.outside

    def _called(self, trial: Trial, axis: Axis, name: str) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            trial.inside += 1
            try:
                result = self._answer(trial, axis, name, module, args, kwargs)
            finally:
                trial.inside -= 1
            if any(module is border for border in self._borders[:-1]):
                _refuse_cut_results(module, args, result)
            return result

        return called

    def _answer(self, trial: Trial, axis: Axis, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if isinstance(module, nn.Embedding):
            if _counts(args[0] if args else kwargs["input"]):
                self._whole.setdefault(name, "a table of positions")
            return call_of(module)(*args, **kwargs)
        if isinstance(module, nn.MultiheadAttention):
            if name in self._whole:
                return call_of(module)(*args, **kwargs)
            trial.must_divide(name, module.num_heads, "heads")
            self._set(trial, name, Role("heads", (module.embed_dim,)))
            return heads(module, axis, (module.embed_dim,), *args, **kwargs)
        value = args[0] if args else kwargs["input"]
        cut = along_axis(value, "tp")
        if cut is not None and cut.dim == value.dim() - 1 and cut.origins:
            if name in self._closed:
                reason = f"{name}, which takes it in, stays whole: {self._whole[name]}"
                raise CannotCutError([cut.origins], reason)
            if self._whole.get(name) == SAID:
                reason = f"tensor.roles says that {name}, which takes it in, is whole"
                raise CannotCutError([cut.origins], reason, stated=True)
            if self._stated.get(name) == "column":
                reason = f"tensor.roles says that {name}, which takes it in, is a column"
                raise CannotCutError([cut.origins], reason, stated=True)
            for origin in sorted(cut.origins):
                trial.partners.setdefault(origin, []).append(name)
            for part in set(cut.parts):
                trial.divides(cut, part, "features")
            self._set(trial, name, Role("row", cut.parts), cut)
            return row(module, axis, cut.parts, value)
        if cut is not None and cut.origins:
            return call_of(module)(*args, **kwargs)
        if self._stated.get(name, self._hints.get(name)) == "row" and name not in self._whole:
            self._set(trial, name, Role("row", (features(module)[0],)))
            trial.must_divide(name, features(module)[0], "features")
            return row(module, axis, (features(module)[0],), value)
        if name in self._whole:
            return call_of(module)(*args, **kwargs)
        parts = self._parts.get(name, (features(module)[1],))
        self._set(trial, name, Role("column", parts))
        for part in set(parts):
            trial.must_divide(name, part, "features")
        return column(module, axis, parts, value)

    def _set(self, trial: Trial, name: str, role: Role, cut: Along | None = None) -> None:
        """A module has one role, however often it is called."""
        before = trial.roles.setdefault(name, role)
        if before != role:
            blamed = [frozenset([name])] if cut is None or before.kind == "column" else [cut.origins]
            raise CannotCutError(blamed, f"{name} is called again with values that are cut in another way")

    def _settle_tables(self, trial: Trial) -> None:
        """Tables of embeddings are cut where they are large, or tied to a matrix that is cut."""
        total = sum(parameter.numel() for parameter in self._model.parameters())
        tied = {name.rpartition(".")[0] for group in tied_names(self._model) for name in group}
        for name, module in self._candidates.items():
            if not isinstance(module, nn.Embedding) or name in self._whole:
                continue
            if name not in tied and module.weight.numel() < WORTH_CUTTING * total:
                self._whole[name] = "a small table"
            elif name not in tied and not self._has_rows_for_all(len(module.weight)):
                self._whole[name] = f"its {len(module.weight)} rows are too few for {self._tp} ranks"
            else:
                trial.roles[name] = Role("vocabulary", (len(module.weight),))

    def _has_rows_for_all(self, size: int) -> bool:
        """Whether every rank gets something of an uneven share."""
        return size > -(-size // self._tp) * (self._tp - 1)

    def _settle_ties(self, trial: Trial) -> None:
        """A parameter that several modules share is cut in one way, and none that is used without its module."""
        seen = {name: line for name, line in trial.outside.items() if name in trial.roles}
        self._closed |= seen.keys()
        for name, line in seen.items():
            self._whole[name] = f"its weight is used outside of it ({line})"
        if seen:
            raise CannotCutError([frozenset(seen)], "weights are used outside of their modules", stated=True)
        for group in tied_names(self._model):
            ways: dict[str, Along | None] = {}
            for full in group:
                owner = next(
                    (name for name in self._candidates if full.startswith(f"{name}.") or not name),
                    full.rpartition(".")[0],
                )
                role = trial.roles.get(owner)
                found = parameter_cuts(self._candidates[owner], role, Axis("tp", self._tp, 0)) if role else {}
                ways[owner] = found.get(full.removeprefix(f"{owner}."))
            if len(set(ways.values())) > 1:
                others = [name for name in ways if name in trial.roles]
                tables = [name for name in others if trial.roles[name].kind == "vocabulary"]
                for name in tables:
                    self._whole[name] = f"it is tied to {next(one for one in ways if one != name)}, which is whole"
                if not tables:
                    raise CannotCutError([frozenset(others)], "its weight is tied to one that is not cut like it")
                raise CannotCutError([frozenset(tables)], self._whole[tables[0]])

    def _settle_sizes(self, trial: Trial) -> None:
        """What the number of ranks does not divide stays whole outside of blocks or where it is small, else refused."""
        for name, sizes in trial.sizes.items():
            for size, what in sorted(sizes, key=lambda one: one[1] != "heads"):
                if size % self._tp == 0:
                    continue
                inside = self._is_inside(name)
                is_scores = not inside and name not in trial.partners and trial.roles[name].parts == (size,)
                if is_scores and self._has_rows_for_all(size):
                    continue  # the scores of a vocabulary, which may be shared out unevenly
                if what != "heads" and (not inside or self._is_small(name)):
                    raise CannotCutError([frozenset([name])], f"{self._tp} ranks cannot share its {size} {what} evenly")
                whole = f'--set \'tensor.roles={{"{starred(name)}": "whole"}}\''
                raise UserError(
                    f"{name} cannot be cut for tp={self._tp}: tp must divide {size} {what}: {divisors(size)}",
                    f"use one of these sizes, or leave the module whole: {whole}",
                )


def _own_plan(model: nn.Module, candidates: Mapping[str, nn.Module]) -> dict[str, str]:
    """What a model of Hugging Face's library says itself of how its matrices are cut."""
    kinds = {"colwise": "column", "rowwise": "row"}
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        stated = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if stated and getattr(module, "base_model", None) is module:
            for pattern, kind in stated.items():
                full = f"{prefix}.{pattern}".lstrip(".")
                named = [name for name in candidates if fnmatch.fnmatchcase(name, full)]
                found |= dict.fromkeys(named, kinds[kind]) if kind in kinds else {}
    return found


def owner_of(name: str, modules: Sequence[str]) -> str | None:
    """Which of some modules one is, or is in."""
    return next((one for one in modules if name == one or name.startswith(f"{one}.")), None)


def starred(name: str) -> str:
    """A name with * for the numbers in it, which is a pattern for the same module in every block."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def divisors(number: int) -> str:
    """The numbers that divide one, for people: 1, 2, 3 or 6."""
    found = [str(one) for one in range(1, number + 1) if number % one == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _counts(numbers: torch.Tensor) -> bool:
    """Whether these are 0, 1, 2, ..., or several times that: positions, of which each rank needs all rows."""
    if is_fake(numbers) or numbers.dim() == 0 or numbers.shape[-1] < 2:
        return False
    return bool((plain(numbers).diff(dim=-1) == 1).all())


def _unfit(module: nn.Module) -> str | None:
    """Why a module cannot be cut whatever it is used for."""
    if isinstance(module, nn.MultiheadAttention):
        return unfit_for_heads(module)
    if is_linear(module) and features(module)[1] == 1:
        return "it returns one value"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "it has max_norm, sparse or scale_grad_by_freq"
        if type(module).forward is not nn.Embedding.forward:
            return "it has a forward of its own"
    return None


def _refuse_cut_results(_: nn.Module, __: Any, output: Any) -> None:
    for tensor in tensors_of(output):
        for one in along_of(tensor):
            one.axis.observer.cannot([one], "it leaves a part of the pipeline", None)
