"""The parallel layout of a run: named mesh axes and their sizes, written as text such as `dp=2,fsdp=4`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from lockstep.errors import UserError, unknown

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""Mesh axes, outermost first: the talkative ones (tp, then cp) stay inside a node."""

AUTO = "auto"
"""The text for a layout that is chosen for the model and the machine (planner/search/layout_auto.py)."""

AXIS_MEANING = {
    "pp": "pipeline stages",
    "dp": "replicas of the model",
    "fsdp": "shards of the parameters, gradients and optimizer state",
    "cp": "parts of each sequence",
    "tp": "parts of each matrix",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes. `auto` names the axis that still has to take what is left of the world size."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    auto: str | None = None

    @staticmethod
    def parse(text: str) -> Layout:
        """Read `dp=2,fsdp=4`, `dp=auto` or `single`; every mistake is a UserError."""
        if text.strip() == "single":
            return Layout()
        if text.strip() == AUTO:
            raise UserError(
                "layout auto is chosen by lockstep train and lockstep run, which look at the model first",
                "start the script with lockstep run, or name a layout, such as dp=2",
            )
        sizes: dict[str, int] = {}
        auto: str | None = None
        for part in text.split(","):
            axis, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise UserError(
                    f"cannot read {part.strip()!r} in layout {text!r}", "write axis=size, as in dp=2,fsdp=4"
                )
            if axis == "ep":
                raise UserError(
                    "expert parallelism (ep) is not available",
                    "use fsdp to shard experts, or tp, which cuts the matrices of each",
                )
            if axis not in AXES:
                raise unknown(f"axis in layout {text!r}:", axis, AXES)
            if axis in sizes or axis == auto:
                raise UserError(f"layout {text!r} names {axis} twice", f"give {axis} one size")
            if size == "auto":
                if auto:
                    raise UserError(f"layout {text!r} has two auto axes", "only one axis can take what is left")
                auto = axis
            elif size.isascii() and size.isdigit() and int(size) > 0:
                sizes[axis] = int(size)
            else:
                raise UserError(
                    f"{axis}={size} in layout {text!r} is not a size",
                    "sizes are whole numbers from 1, or auto",
                )
        return Layout(**sizes, auto=auto)

    def resolve(self, world_size: int) -> Layout:
        """The layout with its auto axis filled in, checked against the world size and what goes together."""
        if (self.cp > 1 or self.auto == "cp") and (self.pp > 1 or self.auto == "pp"):
            raise UserError(
                f"layout {self} has both cp and pp, and what crosses from stage to stage is not cut by sequence yet",
                f"use layout {replace(self, cp=1, tp=self.tp * self.cp, auto=None)} or "
                f"{replace(self, pp=1, fsdp=self.fsdp * self.pp, auto=None)}",
            )
        layout = self
        if self.auto and world_size % self.world_size == 0:
            layout = replace(self, **{self.auto: world_size // self.world_size}, auto=None)
        if layout.auto or layout.world_size != world_size:
            raise UserError(
                f"layout {self} needs {self._arithmetic()} but there {_are(world_size)}",
                f"use --nproc {self.world_size}{' or a multiple of it' if self.auto else ''}, "
                f"or layout {' or '.join(map(str, _closest_layouts(self, world_size)))}",
            )
        return layout

    def size(self, axis: str) -> int:
        """The number of ranks along one axis."""
        value = getattr(self, axis)
        assert isinstance(value, int)
        return value

    @property
    def world_size(self) -> int:
        """How many processes the layout takes (an auto axis counts as 1)."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def team(self) -> int:
        """How many ranks compute one forward of the same samples together, each a part of every value."""
        return self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Over how many ranks the samples of a step are spread."""
        return self.dp * self.fsdp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank sits on the mesh: axis -> index."""
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.size(axis))
        return {axis: position[axis] for axis in AXES}

    def ranks_along(self, *axes: str) -> list[list[int]]:
        """All ranks, in sets of those that differ only along these axes."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinate(rank)
            sets.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(sets.values())

    def data_rank(self, rank: int) -> int:
        """The index of a rank among those that read different samples."""
        at = self.coordinate(rank)
        return at["dp"] * self.fsdp + at["fsdp"]

    def explain(self) -> str:
        """One line for people: what each axis does here."""
        named = [f"{axis}={self.size(axis)} {AXIS_MEANING[axis]}" for axis in AXES if self.size(axis) > 1]
        return "; ".join(named) if named else "one process, nothing is cut"

    def _arithmetic(self) -> str:
        named = [self.size(field.name) for field in fields(self) if field.name != "auto" and self.size(field.name) > 1]
        product = " x ".join(map(str, named)) or "1"
        if self.auto:
            return f"a multiple of {product} processes"
        if len(named) < 2:
            return f"{product} process{'es' if named else ''}"
        return f"{product} = {self.world_size} processes"

    def __str__(self) -> str:
        parts = [
            f"{axis}={'auto' if axis == self.auto else self.size(axis)}"
            for axis in AXES
            if axis == self.auto or self.size(axis) > 1
        ]
        return ",".join(parts) or "single"


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _closest_layouts(wanted: Layout, world_size: int) -> list[Layout]:
    """Up to three layouts that fit the world size, those most like the wanted one first."""

    def factorised(axes: list[str], left: int) -> Iterator[Layout]:
        if not axes:
            yield Layout(fsdp=left)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                for rest in factorised(axes[1:], left // size):
                    yield replace(rest, **{axes[0]: size})  # type: ignore[arg-type]

    asked = [axis for axis in AXES if axis in ("pp", "dp") or wanted.size(axis) > 1 or wanted.auto == axis]

    def distance(layout: Layout) -> float:
        return sum(abs(math.log(layout.size(axis) / wanted.size(axis))) for axis in AXES)

    fitting = factorised([axis for axis in asked if axis != "fsdp"], world_size)
    possible = [layout for layout in fitting if layout.cp == 1 or layout.pp == 1]
    return sorted(possible, key=lambda layout: (distance(layout), layout.pp, layout.fsdp, layout.tp, layout.cp))[:3]
