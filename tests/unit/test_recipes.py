"""The recipes: valid defaults, losses that are sums, data that follow from the seed, a causal model."""

import importlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import DataLoader, default_collate

from lockstep.config.catalog import (
    RECIPES,
    Cifar10Settings,
    DigitsSettings,
    LinearSettings,
    LmSettings,
    MnistSettings,
    Wikitext2Settings,
    find_recipe,
)
from lockstep.data.loader import count_tokens
from lockstep.errors import UserError
from lockstep.recipes import lm, resnet, toy, vision, wikitext
from tests.sets import WRITE

SMALL = LmSettings(context=16, width=16, layers=2, heads=2, validation_samples=5)
SMALL_WORDS = Wikitext2Settings(context=16, width=16, hidden=32)
SETTINGS = {"lm": SMALL, "wikitext2": SMALL_WORDS, "cifar10": Cifar10Settings(width=4)}


PATHS: dict[str, str] = {}


@pytest.fixture(autouse=True, scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tiny sets in the official formats, for the recipes that have none built in."""
    for name, write in WRITE.items():
        PATHS[name] = str(write(tmp_path_factory.mktemp(name)))


def task_of(name: str, seed: int = 0) -> Any:
    recipe = find_recipe(name)
    make_task = getattr(importlib.import_module(recipe.module), recipe.function)
    return make_task(SETTINGS.get(name, recipe.model_settings()), PATHS.get(name), seed)


def text_file(folder: Path, size: int) -> str:
    path = folder / "text.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog. " * size)[:size])
    return str(path)


class TestCatalog:
    def test_the_default_is_the_language_model(self):
        assert next(iter(RECIPES)) == "lm"
        assert set(RECIPES) == {"lm", "digits", "linear", "wikitext2", "mnist", "cifar10"}

    def test_it_imports_without_torch(self):
        code = "import sys, lockstep.config.catalog; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

    def test_a_mistyped_name_is_answered_with_the_nearest_one(self):
        with pytest.raises(UserError, match="unknown recipe 'digit': did you mean 'digits'"):
            find_recipe("digit")

    @pytest.mark.parametrize("name", RECIPES)
    def test_the_default_model_settings_are_valid_and_complete(self, name):
        recipe = RECIPES[name]
        assert recipe.model_settings.model_validate(recipe.defaults["model"], strict=True) == recipe.model_settings()
        assert recipe.defaults["global_batch"] % recipe.defaults["micro_batch"] == 0
        assert ("steps" in recipe.defaults) != ("epochs" in recipe.defaults)
        assert "\n" not in recipe.summary

    @pytest.mark.parametrize(
        ("model", "wrong"),
        [
            (LmSettings, {"width": -128}),
            (LmSettings, {"layers": 0}),
            (LmSettings, {"dropout": 1.0}),
            (LmSettings, {"widht": 128}),
            (LmSettings, {"prompt": ""}),
            (DigitsSettings, {"layers": 0}),
            (LinearSettings, {"features": -1}),
            (MnistSettings, {"width": 0}),
            (Cifar10Settings, {"layers": 18}),
            (Wikitext2Settings, {"dropout": 1.5}),
        ],
    )
    def test_senseless_settings_are_refused(self, model, wrong):
        with pytest.raises(ValidationError):
            model(**wrong)

    @pytest.mark.parametrize("settings", [LmSettings, Wikitext2Settings])
    def test_heads_have_to_share_the_width_evenly(self, settings):
        with pytest.raises(ValidationError, match="width 100 is not divisible by heads 3"):
            settings(width=100, heads=3)


@pytest.mark.parametrize("name", RECIPES)
class TestEveryTask:
    def test_the_loss_is_a_sum_so_micro_batches_add_up_to_the_whole(self, name):
        task = task_of(name)
        model = task.build_model().eval()
        samples = [task.train[index] for index in range(8)]
        whole, whole_weight = task.loss(model, default_collate(samples))
        parts = [task.loss(model, default_collate(part)) for part in (samples[:3], samples[3:])]
        assert sum(weight for _, weight in parts) == whole_weight
        torch.testing.assert_close(parts[0][0] + parts[1][0], whole)

    def test_the_weight_counts_the_items_of_the_batch(self, name):
        task = task_of(name)
        batch = default_collate([task.train[0], task.train[1]])
        _, weight = task.loss(task.build_model(), batch)
        tokens, padding = count_tokens(task.tokens, batch) if task.tokens else (2, 0)
        assert weight == tokens - padding

    def test_metrics_are_sums_too(self, name):
        task = task_of(name)
        batch = default_collate([task.train[index] for index in range(8)])
        for metric in task.metrics.values():
            total, count = metric(task.build_model(), batch)
            assert 0 <= float(total) <= count == 8

    def test_the_same_seed_gives_the_same_data_and_model(self, name):
        one, other = task_of(name), task_of(name)
        torch.manual_seed(3)
        sample = one.train[7]
        torch.manual_seed(3)
        for key, value in other.train[7].items():
            assert value.equal(sample[key])
        torch.manual_seed(3)
        weights = one.build_model().state_dict()
        torch.manual_seed(3)
        for key, value in other.build_model().state_dict().items():
            assert value.equal(weights[key])

    def test_an_untrained_model_does_not_beat_the_baseline(self, name):
        task = task_of(name)
        torch.manual_seed(0)
        model = task.build_model().eval()
        total, weight = task.loss(model, default_collate([task.validation[i] for i in range(len(task.validation))]))
        assert total.item() / weight > 0.9 * task.baseline[1]


class TestLm:
    def test_future_tokens_do_not_change_earlier_logits(self):
        model = lm.GPT(SMALL)
        tokens = torch.randint(0, 256, (2, 16))
        changed = tokens.clone()
        changed[:, 9:] = (changed[:, 9:] + 1) % 256
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=0)
        assert not before[:, 9:].equal(after[:, 9:])

    def test_an_earlier_token_does_change_later_logits(self):
        model = lm.GPT(SMALL)
        tokens = torch.randint(0, 256, (1, 16))
        changed = tokens.clone()
        changed[0, 0] = (changed[0, 0] + 1) % 256
        assert not model(tokens)[0, 15].equal(model(changed)[0, 15])

    def test_the_head_is_the_embedding(self):
        model = lm.GPT(SMALL)
        assert model.head.weight is model.tokens.weight

    def test_an_untrained_model_knows_nothing_and_is_not_too_sure_of_itself(self):
        torch.manual_seed(0)
        model = lm.GPT(LmSettings())
        batch = {"x": torch.randint(0, 256, (4, 128)), "y": torch.randint(0, 256, (4, 128))}
        total, weight = lm.loss(model, batch)
        assert 5.4 < total.item() / weight < 7, "a uniform guess has 5.545"

    def test_dropout_acts_in_training_only(self):
        model = lm.GPT(SMALL.model_copy(update={"dropout": 0.5}))
        tokens = torch.randint(0, 256, (1, 16))
        assert not model(tokens).equal(model(tokens))
        model.eval()
        assert model(tokens).equal(model(tokens))

    def test_validation_samples_are_evenly_spaced_over_the_whole_text(self):
        validation = task_of("lm").validation
        assert len(validation) == 5
        samples = len(validation.dataset)
        assert validation.indices == [0, samples // 5, 2 * samples // 5, 3 * samples // 5, 4 * samples // 5]

    def test_a_users_own_file_is_split_95_to_5_without_an_overlap(self, tmp_path: Path):
        task: Any = lm.task(SMALL, text_file(tmp_path, 10_000), seed=0)
        assert (len(task.train.tokens), len(task.validation.dataset.tokens)) == (9_500, 500)
        assert task.baseline[1] < 2

    @pytest.mark.parametrize("size", [0, 10, 300])
    def test_an_empty_or_too_short_file_is_refused_by_name(self, tmp_path: Path, size):
        with pytest.raises(UserError, match=r"empty|too few") as refusal:
            lm.task(SMALL, text_file(tmp_path, size), seed=0)
        assert "text.txt" in refusal.value.cause

    def test_a_missing_file_is_refused_by_name(self, tmp_path: Path):
        with pytest.raises(UserError, match=r"nothere\.txt cannot be read"):
            lm.task(SMALL, str(tmp_path / "nothere.txt"), seed=0)

    def test_the_showcase_is_the_same_every_time_and_leaves_the_model_and_the_global_stream_alone(self):
        task = task_of("lm")
        model = task.build_model().train()
        state = torch.random.get_rng_state()
        assert task.generate is not None
        first, second = (task.generate(model, task.prompt, 40, 0.7, 0) for _ in range(2))
        assert first == second
        assert len(first.encode()) >= 40
        assert model.training
        assert torch.random.get_rng_state().equal(state)

    def test_generation_goes_on_past_the_context_and_prefers_what_the_model_prefers(self):
        class Alphabet(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.sharpness = nn.Parameter(torch.tensor(100.0))

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                assert tokens.shape == (1, 4)
                return nn.functional.one_hot(tokens + 1, 256) * self.sharpness

        assert lm.generate(Alphabet(), 4, b"ab", length=8, temperature=1.0, seed=0) == b"cdefghij"


class TestDigits:
    def test_accuracy_counts_the_digits_read_right(self):
        class Fixed(nn.Module):
            def forward(self, pixels: torch.Tensor) -> torch.Tensor:
                return pixels

        batch = {"x": torch.eye(10)[[3, 4, 5]], "y": torch.tensor([3, 4, 9])}
        right, count = vision.accuracy(Fixed(), batch)
        assert (right.item(), count) == (2, 3)

    def test_it_reads_96_percent_after_its_default_training(self):
        task = task_of("digits")
        model = train(task, RECIPES["digits"].defaults)
        right, count = vision.accuracy(model, default_collate(list(task.validation)))
        assert right / count >= 0.96


class TestMnist:
    def test_the_default_is_784_256_10(self):
        linear = [m for m in task_of("mnist").build_model() if isinstance(m, nn.Linear)]
        assert [(m.in_features, m.out_features) for m in linear] == [(784, 256), (256, 10)]

    def test_it_learns_to_read(self):
        task = task_of("mnist")
        model = train(task, RECIPES["mnist"].defaults | {"global_batch": 8})
        right, count = vision.accuracy(model, default_collate(list(task.test)))
        assert int(right) == count == 13, "of the tiny set, whose digits are bright rows"


class TestCifar10:
    def test_the_default_is_resnet_18_with_a_stem_for_small_images(self):
        model = resnet.ResNet18(Cifar10Settings())
        assert sum(p.numel() for p in model.parameters()) == 11_173_962
        assert model.blocks(model.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 512, 4, 4)
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
        assert len(convolutions) == 17, "and the head makes eighteen"
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

    def test_only_training_images_are_augmented(self):
        task = task_of("cifar10")
        assert task.train.augment
        assert not task.validation.augment
        assert not task.test.augment


class TestWikitext2:
    def test_future_words_do_not_change_earlier_logits_neither_in_training_nor_in_evaluation(self):
        model = wikitext.WordModel(SMALL_WORDS.model_copy(update={"dropout": 0.0}), 11)
        words = torch.randint(0, 10, (2, 16))
        changed = words.clone()
        changed[:, 9:] += 1
        scores = []
        for training in (True, False):
            with torch.no_grad():
                before, after = (model.train(training)(text) for text in (words, changed))
            torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
            assert not before[:, 9:].allclose(after[:, 9:])
            scores.append(before)
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)

    def test_the_same_word_elsewhere_has_other_logits(self):
        model = wikitext.WordModel(SMALL_WORDS, 11).eval()
        logits = model(torch.zeros(1, 16, dtype=torch.int64))[0]
        assert not logits[3].allclose(logits[4])

    def test_its_layers_do_not_start_as_copies_of_each_other(self):
        first, second = wikitext.WordModel(SMALL_WORDS, 11).encoder.layers
        assert not first.self_attn.in_proj_weight.equal(second.self_attn.in_proj_weight)

    @pytest.mark.parametrize(("context", "width"), [(1, 1), (7, 5), (16, 8)])
    def test_positions_are_waves(self, context, width):
        encoding = wikitext.positional_encoding(context, width)
        assert encoding.shape == (context, width)
        assert encoding[0].tolist() == [0.0, 1.0] * (width // 2) + [0.0] * (width % 2)
        if context > 2 and width > 1:
            assert encoding[2, 1].item() == pytest.approx(math.cos(2))

    def test_what_fills_up_the_last_window_counts_for_nothing(self):
        task = task_of("wikitext2")
        model = task.build_model().eval()
        assert len(task.test.tokens) == 130
        batch = default_collate(list(task.test))
        total, weight = task.loss(model, batch)
        assert weight == 129
        batch["x"][-1, 129 % 16 :] = 3
        torch.testing.assert_close(task.loss(model, batch)[0], total)


class TestLinear:
    def test_the_error_goes_to_nearly_zero_in_its_default_training(self):
        task = task_of("linear")
        model = train(task, RECIPES["linear"].defaults)
        total, weight = task.loss(model, default_collate(list(task.validation)))
        assert total.item() / weight < 1e-6

    def test_other_seeds_give_other_data(self):
        assert not task_of("linear", seed=0).train[0]["x"].equal(task_of("linear", seed=1).train[0]["x"])

    def test_the_default_is_20_features_one_output_and_2048_samples(self):
        task = task_of("linear")
        assert len(task.train) == 2048
        assert task.train[0]["x"].shape == (20,)
        assert task.train[0]["y"].shape == (1,)


@pytest.mark.parametrize("recipe", [vision, toy])
def test_recipes_with_built_in_data_refuse_a_path(recipe):
    name = {"lockstep.recipes.vision": "digits", "lockstep.recipes.toy": "linear"}[recipe.__name__]
    with pytest.raises(UserError, match=r"cannot read mine\.csv: leave data\.path out"):
        recipe.task(RECIPES[name].model_settings(), "mine.csv", seed=0)


def train(task: Any, defaults: dict[str, Any]) -> Any:
    """A plain loop over the default epochs at the default learning rate."""
    torch.manual_seed(0)
    model = task.build_model()
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    described = defaults["optimizer"]
    optimizer = kinds[described["name"]](model.parameters(), lr=described["lr"], **described["args"])
    for _ in range(defaults["epochs"]):
        for batch in DataLoader(task.train, defaults["global_batch"], shuffle=True):
            total, weight = task.loss(model, batch)
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()
