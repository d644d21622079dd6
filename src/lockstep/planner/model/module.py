"""Any nn.Module as the planner sees it: built without data, its forward followed once. Imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.config import catalog
from lockstep.config.schema import Config
from lockstep.data.images import MNIST_SIDE
from lockstep.errors import UserError, nearest
from lockstep.planner.model.from_forward import model_from_forward
from lockstep.planner.model.parts import Model
from lockstep.recipes import resnet, toy, vision, wikitext
from lockstep.runtime.torch_private import FakeTensorMode, own_buffers, own_parameters

TOKENS = 1024
IMAGE = 224
SAMPLES = 2
"""Of a batch that is guessed: batch norm refuses one sample that has one pixel left."""
WIKITEXT_WORDS = 33_278
"""The vocabulary of WikiText-2 (Merity et al. 2016, table 1), for whoever has not fetched it."""


@dataclass(frozen=True)
class Sample:
    """What a forward is given: a batch of so many samples of so many tokens."""

    arguments: tuple[Any, ...]
    batch: int
    tokens: int
    keywords: Mapping[str, Any] = field(default_factory=dict)
    guess: str = ""


def model_of_function(where: str, function: str, sequence: int | None) -> Model:
    """The model that `module:function` or `file.py:function` builds.

    The function takes nothing and returns an nn.Module, or that and the inputs of its forward: a tensor, a tuple of
    arguments or a dict of keywords, whose first dim is the batch.
    """
    name = f"{where}:{function}"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = _built(name, find_function(where, function), mode)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{name} returned a {type(model).__name__}", "return an nn.Module, or that and the inputs of its forward"
        )
    with mode:
        sample = guess_inputs(name, model, sequence) if inputs is None else given_inputs(name, inputs)
    found = _followed(name, model, mode, sample, lambda: model(*sample.arguments, **sample.keywords))
    return replace(found, notes=(sample.guess,)) if sample.guess else found


def model_of_recipe(name: str, config: Config, sequence: int | None) -> Model:
    """The model of a recipe with its loss; the data need not have been fetched."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    settings = catalog.find_recipe(config.recipe).model_settings(**config.model)
    tokens = 1
    if isinstance(settings, catalog.Wikitext2Settings):
        tokens = sequence or settings.context
        settings = settings.model_copy(update={"context": tokens})
    with mode:
        build, loss, x, y = _of_settings(settings)
        batch = {"x": x, "y": y}
    model = _built(name, build, mode)
    return _followed(name, model, mode, Sample((), SAMPLES, tokens), lambda: loss(model, batch))


def _of_settings(settings: Any) -> tuple[Callable[[], nn.Module], Callable[..., Any], Tensor, Tensor]:
    """How a recipe's model is built, its loss, and a batch for it."""
    classes = torch.zeros(SAMPLES, dtype=torch.long)
    if isinstance(settings, catalog.DigitsSettings):
        return lambda: vision.DigitReader(settings), vision.loss, torch.zeros(SAMPLES, vision.PIXELS), classes
    if isinstance(settings, catalog.MnistSettings):
        pixels = torch.zeros(SAMPLES, 1, MNIST_SIDE, MNIST_SIDE)
        return lambda: vision.mnist_model(settings), vision.loss, pixels, classes
    if isinstance(settings, catalog.Cifar10Settings):
        return lambda: resnet.ResNet18(settings), vision.loss, torch.zeros(SAMPLES, 3, 32, 32), classes
    if isinstance(settings, catalog.Wikitext2Settings):
        words = torch.zeros(SAMPLES, settings.context, dtype=torch.long)
        return lambda: wikitext.WordModel(settings, WIKITEXT_WORDS), wikitext.loss, words, words
    assert isinstance(settings, catalog.LinearSettings)
    features = torch.zeros(SAMPLES, settings.features)
    return lambda: nn.Linear(settings.features, 1), toy.loss, features, torch.zeros(SAMPLES, 1)


def find_function(where: str, function: str) -> Callable[[], Any]:
    """The function that builds the model, from a module or a file."""
    name = f"{where}:{function}"
    try:
        module = _load_file(Path(where).expanduser()) if where.endswith(".py") else _load_module(where)
    except UserError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise UserError(
            f"{where} cannot be imported ({type(error).__name__}: {error})", "give a module or file that Python imports"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        close = nearest(function, [key for key, value in vars(module).items() if callable(value)])
        fix = f"did you mean {where}:{close}?" if close else "give the name of a function that builds the model"
        raise UserError(f"there is no function {name}", fix)
    return cast(Callable[[], Any], found)


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as python -m has it; an installed command does not
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {path}", "give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _built(name: str, build: Callable[[], Any], mode: FakeTensorMode) -> Any:
    """What a function returns; without any memory for weights, unless it looks at values on its way."""
    with suppress(Exception), warnings.catch_warnings(), mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch copies its own layers
        return build()
    try:
        return build()
    except Exception as error:  # whatever the user's own code raises
        raise UserError(
            f"{name} failed ({type(error).__name__}: {error})",
            "give a function without arguments that builds the model",
        ) from None


def _drop_data(model: nn.Module) -> None:
    """Give every parameter and buffer anew, with a shape alone: those of a module that was copied are not whole."""
    new: dict[int, Tensor] = {}

    def anew(tensor: Tensor) -> Tensor:
        if id(tensor) not in new:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            new[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return new[id(tensor)]

    for module in model.modules():
        for table in (own_parameters(module), own_buffers(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = anew(tensor)


def guess_inputs(name: str, model: nn.Module, sequence: int | None) -> Sample:
    """Inputs that suit the first layer."""
    first = next((layer for layer in model.modules() if isinstance(layer, nn.Embedding | nn.Conv2d | nn.Linear)), None)
    if isinstance(first, nn.Embedding):
        # A table with fewer rows is one of positions: more tokens than it has could not be trained.
        others = [
            layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding) and layer is not first
        ]
        positions = [rows for rows in others if rows > SAMPLES]
        tokens = sequence or min([TOKENS, *positions])
        what = torch.zeros(SAMPLES, tokens, dtype=torch.long)
        return Sample((what,), SAMPLES, tokens, guess=f"{name} is given {tokens} tokens: its first layer embeds them")
    if isinstance(first, nn.Conv2d):
        pixels = torch.zeros(SAMPLES, first.in_channels, IMAGE, IMAGE)
        size = f"{first.in_channels} x {IMAGE} x {IMAGE}"
        return Sample((pixels,), SAMPLES, 1, guess=f"{name} is given images of {size}: its first layer convolves")
    if isinstance(first, nn.Linear):
        features = torch.zeros(SAMPLES, first.in_features)
        guess = f"{name} is given {first.in_features} numbers a sample: its first layer takes so many"
        return Sample((features,), SAMPLES, 1, guess=guess)
    raise UserError(f"it is not clear what the model of {name} takes", "return (module, inputs) from the function")


def given_inputs(name: str, inputs: Any) -> Sample:
    """Inputs that the function returned beside the model."""
    keywords = inputs if isinstance(inputs, Mapping) else {}
    arguments = () if keywords else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise UserError(f"{name} returned inputs without a tensor", "return a tensor, a tuple or a dict of them")
    first = tensors[0]
    of_text = not first.is_floating_point() and first.dim() == 2
    return Sample(arguments, first.shape[0], first.shape[1] if of_text else 1, keywords)


def _followed(name: str, model: nn.Module, mode: FakeTensorMode, sample: Sample, forward: Callable[[], Any]) -> Model:
    model.train()
    try:
        with mode:
            _drop_data(model)
            return model_from_forward(name, model, forward, sample.batch, sample.tokens)
    except UserError:
        raise
    except Exception as error:  # of the user's forward, or of an operation that needs values
        raise UserError(
            f"the forward of {name} cannot be followed without data ({type(error).__name__}: {error})",
            "return (module, inputs) from the function, with inputs that suit it",
        ) from None
