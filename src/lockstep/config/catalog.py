"""The recipes by name, with their settings and defaults. Imports without torch, for `--list` and `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.errors import unknown


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width {width} is not divisible by heads {heads}: make it a multiple of heads")


class LmSettings(BaseModel):
    """The `[model]` table of `lm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(128, gt=0, description="bytes the model sees at once")
    width: int = Field(96, gt=0, description="size of the hidden state")
    layers: int = Field(4, gt=0, description="number of blocks")
    heads: int = Field(4, gt=0, description="attention heads of a block")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of activations dropped while training")
    validation_samples: int = Field(
        256, gt=0, description="samples of the validation text that are scored, evenly spaced over all of it"
    )
    prompt: str = Field("The state of the Union is ", min_length=1, description="what the trained model goes on from")

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> LmSettings:
        _check_heads(self.width, self.heads)
        return self


class DigitsSettings(BaseModel):
    """The `[model]` table of `digits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(128, gt=0, description="size of the hidden state")
    layers: int = Field(2, gt=0, description="number of hidden layers")


class MnistSettings(BaseModel):
    """The `[model]` table of `mnist`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(256, gt=0, description="size of the hidden layer")


class Cifar10Settings(BaseModel):
    """The `[model]` table of `cifar10`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(64, gt=0, description="channels of the first stage; 64 is ResNet-18, 16 suits a CPU")


class Wikitext2Settings(BaseModel):
    """The `[model]` table of `wikitext2`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(60, gt=0, description="words the model sees at once")
    width: int = Field(200, gt=0, description="size of the hidden state; 64 suits a CPU")
    layers: int = Field(2, gt=0, description="number of encoder layers")
    heads: int = Field(2, gt=0, description="attention heads of a layer")
    hidden: int = Field(200, gt=0, description="size of a layer's feed-forward part")
    dropout: float = Field(0.2, ge=0, lt=1, description="share of activations dropped while training")

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> Wikitext2Settings:
        _check_heads(self.width, self.heads)
        return self


class LinearSettings(BaseModel):
    """The `[model]` table of `linear`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: int = Field(20, gt=0, description="inputs of the linear map")
    samples: int = Field(2048, gt=0, description="training samples to draw")


@dataclass(frozen=True)
class Recipe:
    """A training that ships with Lockstep. `defaults` is a config as TOML would give it."""

    name: str
    summary: str
    module: str
    model_settings: type[BaseModel]
    defaults: dict[str, Any]
    function: str = "task"
    """The function of the module that makes the task."""


_LM = Recipe(
    name="lm",
    summary="a small GPT on 230 years of State of the Union addresses, byte by byte",
    module="lockstep.recipes.lm",
    model_settings=LmSettings,
    defaults={
        "steps": 700,
        "global_batch": 16,
        "micro_batch": 4,
        "seed": 0,
        "precision": "fp32",
        "clip": 1.0,
        "validate_every": "100 steps",
        "save_every": "100 steps",
        "optimizer": {"name": "adamw", "lr": 6e-3, "args": {"weight_decay": 0.1, "betas": [0.9, 0.99]}},
        "schedule": {"name": "cosine", "warmup_steps": 20, "final": 0.1},
        "model": LmSettings().model_dump(),
    },
)

_DIGITS = Recipe(
    name="digits",
    summary="a multi-layer perceptron on 1,797 handwritten digits of 8 x 8 pixels",
    module="lockstep.recipes.vision",
    model_settings=DigitsSettings,
    defaults={
        "epochs": 20,
        "global_batch": 64,
        "micro_batch": 16,
        "seed": 0,
        "precision": "fp32",
        "clip": 1.0,
        "validate_every": "5 epochs",
        "save_every": "10 epochs",
        "optimizer": {"name": "adamw", "lr": 3e-3, "args": {"weight_decay": 0.01}},
        "schedule": {"name": "cosine", "warmup_steps": 20, "final": 0.1},
        "model": DigitsSettings().model_dump(),
    },
)

_WIKITEXT2 = Recipe(
    name="wikitext2",
    summary="a word-level transformer on WikiText-2, scored by its perplexity (lockstep fetch wikitext2)",
    module="lockstep.recipes.wikitext",
    model_settings=Wikitext2Settings,
    defaults={
        "epochs": 3,
        "global_batch": 32,
        # On CPUs: the logits of 4 x 60 words just fit the 32 MiB up to which glibc reuses memory, which is faster.
        "micro_batch": 4,
        "seed": 0,
        "precision": "fp32",
        "clip": 0.5,
        "validate_every": "1 epoch",
        "save_every": "1 epoch",
        "optimizer": {"name": "adamw", "lr": 1e-3, "args": {"weight_decay": 0.01}},
        "schedule": {"name": "cosine", "warmup_steps": 100, "final": 0.05},
        "model": Wikitext2Settings().model_dump(),
    },
)

_MNIST = Recipe(
    name="mnist",
    summary="a perceptron with one hidden layer on the 70,000 digits of MNIST (lockstep fetch mnist)",
    module="lockstep.recipes.vision",
    function="mnist_task",
    model_settings=MnistSettings,
    defaults={
        "epochs": 10,
        "global_batch": 128,
        "micro_batch": 16,
        "seed": 0,
        "precision": "fp32",
        "validate_every": "1 epoch",
        "save_every": "1 epoch",
        "optimizer": {"name": "adam", "lr": 1e-3, "args": {}},
        "schedule": {"name": "cosine", "warmup_steps": 0, "final": 0.05},
        "model": MnistSettings().model_dump(),
    },
)

_CIFAR10 = Recipe(
    name="cifar10",
    summary="ResNet-18 on the 60,000 images of CIFAR-10 (lockstep fetch cifar10)",
    module="lockstep.recipes.resnet",
    model_settings=Cifar10Settings,
    defaults={
        "epochs": 30,
        "global_batch": 128,
        "micro_batch": 32,
        "seed": 0,
        "precision": "fp32",
        "validate_every": "1 epoch",
        "save_every": "1 epoch",
        "optimizer": {
            "name": "sgd",
            "lr": 0.1,
            "args": {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        },
        "schedule": {"name": "cosine", "warmup_steps": 40, "final": 0.0},
        "model": Cifar10Settings().model_dump(),
    },
)

_LINEAR = Recipe(
    name="linear",
    summary="linear regression on random data (squared error: cross-entropy of one output is always zero)",
    module="lockstep.recipes.toy",
    model_settings=LinearSettings,
    defaults={
        "epochs": 10,
        "global_batch": 32,
        "micro_batch": 8,
        "seed": 0,
        "precision": "fp32",
        "validate_every": "1 epoch",
        "save_every": "5 epochs",
        "optimizer": {"name": "sgd", "lr": 0.01, "args": {}},
        "schedule": {"name": "constant"},
        "model": LinearSettings().model_dump(),
    },
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (_LM, _DIGITS, _LINEAR, _WIKITEXT2, _MNIST, _CIFAR10)}
"""The first one is what `lockstep train` does when it is told nothing."""


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown name is a UserError that says the nearest one."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
