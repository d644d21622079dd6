"""Which parameters train: those that did when the model was cut, but for those the script has frozen since.

How gradients come together is settled when a model is cut. A parameter that was to be trained may be frozen at any step
and unfrozen again; one that was not, or was not there, has no place to bring a gradient to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.errors import UserError
from lockstep.runtime.torch_private import own_modules, own_parameters


class Trainable:
    """The parameters of the models of a rank, as they were when these were cut."""

    def __init__(
        self, models: Sequence[nn.Module], trained: Sequence[tuple[str, nn.Parameter]], is_pipeline: bool
    ) -> None:
        self._is_pipeline = is_pipeline
        self._given = [(name, parameter, [parameter.requires_grad]) for name, parameter in trained]
        self._members = [
            (name, module, dict(own_modules(module)), dict(own_parameters(module)))
            for model in models
            for name, module in model.named_modules()
        ]
        self._at_first = {
            name: (parameter, parameter.requires_grad)
            for model in models
            for name, parameter in model.named_parameters()
        }
        self._before: set[str] | None = None
        self._is_settled = False

    @property
    def frozen(self) -> list[str]:
        """The parameters that the script has frozen since the model was cut."""
        return [
            name for name, (parameter, trained) in self._at_first.items() if trained and not parameter.requires_grad
        ]

    def check(self) -> None:
        """Refuse what has changed so that gradients would be lost; only shards are held when this is called."""
        for owner, module, modules, parameters in self._members:
            _refuse_changed(owner, own_modules(module), modules)
            _refuse_changed(owner, own_parameters(module), parameters)
        self._follow_optimizer()
        for name, (parameter, trained) in self._at_first.items():
            if parameter.requires_grad == trained:
                continue
            if not trained:
                raise UserError(
                    f"the parameter {name} was unfrozen (requires_grad) after run.setup: the optimizer never got it",
                    "leave it trainable in build_model and freeze it after run.setup: then any step may unfreeze it",
                )
            if self._is_pipeline:
                raise UserError(
                    f"the parameter {name} was frozen (requires_grad) after the model was cut into stages",
                    "freeze it in build_model, or use a layout without pp",
                )

    def _follow_optimizer(self) -> None:
        """A script may freeze what the optimizer has of a parameter, which need not be what the model has."""
        for name, given, before in self._given:
            if given.requires_grad != before[0]:
                before[0] = given.requires_grad
                self._at_first[name][0].requires_grad_(before[0])

    def restore(self, frozen: Collection[str]) -> None:
        """Freeze what a checkpoint says; a script that starts again may still do what it did at its first start."""
        self._put_back(frozen)
        if not self._is_settled:
            self._before = set(frozen)

    def settle(self) -> None:
        """Before the first step: what the checkpoint says counts."""
        if self._before is not None:
            self._put_back(self._before)
        self._before, self._is_settled = None, True

    def _put_back(self, frozen: Collection[str]) -> None:
        for name, (parameter, trained) in self._at_first.items():
            if trained:
                parameter.requires_grad_(name not in frozen)


def _refuse_changed(owner: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    if len(now) == len(before) and all(now.get(name) is member for name, member in before.items()):
        return
    name = next(name for name in [*now, *before] if now.get(name) is not before.get(name))
    raise UserError(
        f"{f'{owner}.{name}'.lstrip('.')} was replaced, added or removed after run.setup, and the optimizer has the "
        "model as it was",
        "make the whole model in build_model, with all that is to be trained",
    )
