"""The planner's models: counted exactly, whichever way they are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.catalog import RECIPES
from lockstep.config.layers import Layer, resolve
from lockstep.errors import UserError
from lockstep.planner.model.find_model import find_model
from lockstep.planner.model.huggingface import from_values
from lockstep.planner.model.parts import Model
from lockstep.planner.model.transformer_shape import build
from lockstep.recipes.task import task_of

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
}
"""As the published weights have them."""
MPT = {
    ("mpt-125m", 512): 124_131_840,
    ("mpt-350m", 16384): 370_665_472,
    ("mpt-760m", 2048): 760_470_528,
    ("mpt-1b", 65536): 1_445_974_016,
    ("mpt-3b", 4096): 2_657_080_320,
    ("mpt-7b", 2048): 6_658_859_008,
    ("mpt-13b", 8192): 12_885_411_840,
    ("mpt-30b", 1024): 29_967_874_048,
    ("mpt-70b", 2048): 64_862_437_376,
}
"""NumParams of the tables in mosaicml/llm-foundry scripts/train/benchmarking/README.md."""


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_known_models_have_the_parameters_of_their_weights(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


@pytest.mark.parametrize(("case", "parameters"), MPT.items())
def test_mpt_has_as_many_positions_as_a_sample_has_tokens(case: tuple[str, int], parameters: int) -> None:
    assert find_model(*case).parameters == parameters


def test_resnets_do_the_multiplications_that_are_published() -> None:
    """1.8 and 3.8 to 4.1 billion, of which torchvision says 1.81 and 4.09."""
    assert find_model("resnet18").matmul_flops / 2 == pytest.approx(1.814e9, rel=1e-3)
    assert find_model("resnet50").matmul_flops / 2 == pytest.approx(4.089e9, rel=1e-3)


# ---- Hugging Face

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def of_config(**values: Any) -> Model:
    return build(from_values("model", values, {}), None)


def test_a_config_file_or_its_folder_is_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    model = find_model(str(folder))
    assert (model.name, model.parameters, model.sequence) == ("Llama-3.1-8B", 8_030_261_248, 8192)
    assert find_model(str(folder / "config.json"), 4096).sequence == 4096
    assert find_model(str(folder), None, {"layers": 16}).parameters < 5e9


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_positions": 1024},
         1_557_611_200),
        ({**LLAMA, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
          "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064}, 7_615_616_512),
        ({"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
          "num_hidden_layers": 24, "vocab_size": 30522, "max_position_embeddings": 512}, 335_141_888),
        # pythia-1b and pythia-6.9b
        ({"model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8,
          "num_hidden_layers": 16, "vocab_size": 50304, "max_position_embeddings": 2048}, 1_011_781_632),
        ({"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32,
          "num_hidden_layers": 32, "vocab_size": 50432, "max_position_embeddings": 2048}, 6_857_302_016),
        # opt-125m, opt-6.7b
        ({"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
          "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768}, 125_239_296),
        ({"model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32,
          "num_hidden_layers": 32, "vocab_size": 50272, "max_position_embeddings": 2048}, 6_658_473_984),
        # mpt-7b
        ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432,
          "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True}}, 6_649_286_656),
        # phi-2
        ({"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32,
          "num_hidden_layers": 32, "vocab_size": 51200, "max_position_embeddings": 2048}, 2_779_683_840),
        # qwen3-8b
        ({**LLAMA, "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936,
          "head_dim": 128}, 8_190_735_360),
        ({**LLAMA, "model_type": "nobody knows it"}, 8_030_261_248),
    ],
)  # fmt: skip
def test_configs_of_many_families_are_counted_exactly(config: dict[str, Any], parameters: int) -> None:
    assert of_config(**config).parameters == parameters


def test_what_a_config_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no intermediate_size"):
        of_config(**{key: value for key, value in LLAMA.items() if key != "intermediate_size"})
    with pytest.raises(UserError, match="model has no num_attention_heads"):
        of_config(model_type="new", hidden_size=64, num_hidden_layers=2)
    with pytest.raises(UserError, match="8 experts"):
        of_config(**LLAMA, num_local_experts=8)
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        find_model(str(tmp_path))


# ---- Numbers


def test_numbers_are_a_model() -> None:
    model = find_model("layers=32,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=4096,like=llama")
    assert (model.parameters, model.sequence) == (8_030_261_248, 4096)
    # 12 h^2 + 13 h a block, 2 h in the last norm, and the table of the embedding, which the head shares
    assert find_model("layers=2,hidden=64,heads=4,vocab=100").parameters == 2 * (12 * 64**2 + 13 * 64) + 128 + 6400
    assert find_model("gpt2", None, {"layers": 24}).blocks.count == 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=3,hidden=100,heads=7", "is not divisible by heads 7: use hidden 98 or 105, or heads 5 or 10"),
        ("layers=2,hidden=64,heads=8,kv_heads=3", "not divisible by kv_heads 3: use kv_heads 2 or 4"),
        ("layers=-1,hidden=64,heads=8", "layers=-1 is not valid: give a whole number of at least 1"),
        ("layers=two,hidden=64,heads=8", "layers=two is not valid"),
        ("layers=2,hidden=64", "the model needs heads"),
        ("layers=2,hidden=64,heads=8,wide=3", "unknown number of a model 'wide'"),
        ("layers=2,hidden=64,heads=8,gated=3", "write gated=true or gated=false"),
        ("layers=2,hidden=64,heads=8,like=lama", "did you mean 'llama'"),
        ("lama-3-8b", "did you mean 'llama-3-8b'"),
        ("no such thing", "unknown model.*layers=32,hidden=4096"),
    ],
)  # fmt: skip
def test_wrong_numbers_and_names_are_told_what_is_right(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model(text)


def test_a_sample_cannot_be_longer_than_the_positions() -> None:
    with pytest.raises(UserError, match="1024 learned positions, and samples of 2048"):
        find_model("gpt2", 2048)
    assert find_model("gpt2", 2048, {"positions": 2048}).sequence == 2048


# ---- Recipes and modules


@pytest.mark.parametrize("name", ["lm", "digits", "linear"])
def test_a_recipe_has_the_parameters_of_what_it_builds(name: str) -> None:
    built = task_of(resolve([Layer("here", {"recipe": name})]).config).build_model()
    assert find_model(name).parameters == sum(parameter.numel() for parameter in built.parameters())


def test_recipes_are_planned_before_their_data_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    found = {name: find_model(name) for name in RECIPES}
    assert found["cifar10"].parameters == 11_173_962
    assert found["mnist"].parameters == 784 * 256 + 256 + 256 * 10 + 10
    assert found["wikitext2"].blocks.count == 2
    layer = found["wikitext2"].blocks
    assert [product.cut for product in layer.matmuls] == ["columns", "inner", "columns", "inner"]
    # Queries, keys, values and their mix; both norms and both products of the MLP keep what they read, and attention.
    assert layer.cut_kept == pytest.approx(60 * 200 * 4, rel=0.01)
    assert layer.kept == pytest.approx(60 * 200 * 7, rel=0.01)
    assert find_model("wikitext2", None, {"model": {"layers": 5}}).blocks.count == 5


def test_a_config_of_ours_is_its_recipe_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe = "lm"\n[model]\nlayers = 7\ncontext = 64\n', encoding="utf-8")
    model = find_model(str(path))
    assert (model.name, model.blocks.count, model.sequence) == ("mine", 7, 64)


SOURCE = """
import torch
from torch import nn
from lockstep.recipes.lm import GPT
from lockstep.config.catalog import LmSettings

def gpt():
    return GPT(LmSettings(layers=3, width=64, context=32))

def looks_at_values():
    rates = [rate.item() for rate in torch.linspace(0.1, 0.2, 3)]
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates))

def with_inputs():
    return nn.Bilinear(3, 4, 5), (torch.zeros(6, 3), torch.zeros(6, 4))

def nothing():
    return 3

def unclear():
    return nn.Bilinear(3, 4, 5)

def huge():
    return nn.Sequential(*(nn.Linear(65536, 65536) for _ in range(100)))
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "my_models.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


def test_a_followed_gpt_has_the_numbers_of_the_formulas(source: str) -> None:
    """Counted from operations, and computed from the shape: two ways to the same model."""
    followed = find_model(f"{source}:gpt")
    computed = find_model("lm", None, {"model": {"layers": 3, "width": 64, "context": 32}})
    assert (followed.parameters, followed.sequence) == (computed.parameters, 32)
    assert followed.matmul_flops == computed.matmul_flops
    assert followed.attention_flops == computed.attention_flops
    block, formula = followed.blocks, computed.blocks
    assert (block.count, block.parameters, block.border) == (3, formula.parameters, formula.border)
    assert block.attention == formula.attention
    assert block.matmuls == formula.matmuls  # and how tensor parallelism cuts each of them
    assert block.cut_parameters == formula.cut_parameters
    assert block.kept == pytest.approx(formula.kept, rel=0.03)  # the statistics of norms are counted here
    assert block.cut_kept == pytest.approx(formula.cut_kept, rel=0.03)
    assert "32 tokens" in followed.notes[0]


def test_what_is_kept_is_what_autograd_keeps_of_a_real_forward() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 2))
    from lockstep.planner.model.from_forward import model_from_forward

    found = model_from_forward("small", model, lambda: model(torch.zeros(4, 6)), 4, 1)
    # The first product keeps its input, and the second what the sigmoid wrote and keeps as well.
    assert found.parts[0].kept == 6 + 5
    assert [(one.rows, one.inner, one.columns) for one in found.parts[0].matmuls] == [(1, 6, 5), (1, 5, 2)]


def test_functions_that_look_at_values_are_built_for_real(source: str) -> None:
    model = find_model(f"{source}:looks_at_values")
    assert (model.blocks.count, model.parameters) == (3, 3 * 72)


def test_a_model_too_large_for_this_machine_takes_no_memory(source: str) -> None:
    assert find_model(f"{source}:huge").parameters == 100 * (65536**2 + 65536)


def test_inputs_may_come_with_the_model(source: str) -> None:
    model = find_model(f"{source}:with_inputs")
    assert (model.parameters, model.notes) == (3 * 4 * 5 + 5, ())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "returned a int"),
        ("unclear", r"return \(module, inputs\)"),
        ("gtp", "did you mean .*:gpt"),
    ],
)
def test_functions_that_build_no_model_are_refused(source: str, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model(f"{source}:{function}")


def test_files_that_are_not_there_or_not_python_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        find_model(f"{tmp_path}/none.py:build")
    with pytest.raises(UserError, match=r"cannot be imported .ModuleNotFoundError"):
        find_model("no_such_package.models:build")


def test_models_and_machines_are_found_without_torch() -> None:
    code = (
        "import sys; from lockstep.planner.model.find_model import find_model;"
        "from lockstep.planner.machine.find_machine import find_machine;"
        "find_model('llama-3-70b'); find_model('lm'); find_model('resnet50'); find_machine('64xh100');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
