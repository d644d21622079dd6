"""Values come in layers and each says where it came from; whatever is wrong is one sentence in a user's words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.cadence import Cadence
from lockstep.config.catalog import RECIPES
from lockstep.config.checked import flatten
from lockstep.config.layers import Layer, Resolved, for_world, from_toml, parse_assignments, resolve, to_toml
from lockstep.config.schema import Config, launch_config, script_config
from lockstep.config.toml import read_toml
from lockstep.errors import UserError

JARGON = ("Input should", "String should", "Value error", "type=", "For further information", "validation error", "\n")


def with_set(*assignments: str) -> Resolved:
    return resolve([Layer("--set", parse_assignments(assignments))])


def refusal_of(*assignments: str) -> str:
    with pytest.raises(UserError) as refusal:
        with_set(*assignments)
    return str(refusal.value)


# Layers --------------------------------------------------------------------------------------------------------------


def test_without_any_layer_the_default_recipe_says_how_to_train() -> None:
    resolved = resolve([])
    assert resolved.config.recipe == next(iter(RECIPES))
    assert resolved.config.steps == RECIPES["lm"].defaults["steps"]
    assert resolved.origin["steps"] == "recipe lm"
    assert resolved.origin["keep"] == "default"


@pytest.mark.parametrize(
    ("layers", "seed", "origin"),
    [
        ([], 0, "recipe lm"),
        (["run.toml"], 1, "run.toml"),
        (["run.toml", "the command line"], 2, "the command line"),
        (["run.toml", "the command line", "--set"], 3, "--set"),
    ],
)
def test_a_later_layer_wins_and_is_named_as_the_origin(layers: list[str], seed: int, origin: str) -> None:
    resolved = resolve([Layer(source, {"seed": number}) for number, source in enumerate(layers, start=1)])
    assert resolved.config.seed == seed
    assert resolved.origin["seed"] == origin


def test_a_layer_changes_only_what_it_names_within_a_table() -> None:
    resolved = resolve([Layer("run.toml", {"optimizer": {"lr": 0.5}}), Layer("--set", {"optimizer": {"name": "adam"}})])
    assert (resolved.config.optimizer.lr, resolved.origin["optimizer.lr"]) == (0.5, "run.toml")
    assert (resolved.config.optimizer.name, resolved.origin["optimizer.name"]) == ("adam", "--set")
    assert resolved.origin["schedule.name"] == "recipe lm"


def test_arguments_of_the_optimizer_are_added_to_the_recipes() -> None:
    assert with_set("optimizer.args.weight_decay=0.5").config.optimizer.args == {
        "weight_decay": 0.5,
        "betas": [0.9, 0.99],
    }


def test_another_optimizer_does_not_get_the_arguments_meant_for_the_one_before() -> None:
    resolved = with_set("optimizer.name=sgd")
    assert resolved.config.optimizer.args == {}
    assert resolved.origin["optimizer.args"] == "default"
    assert with_set("optimizer.name=sgd", "optimizer.args.momentum=0.9").config.optimizer.args == {"momentum": 0.9}


def test_a_file_may_name_the_recipe_whose_defaults_it_builds_on() -> None:
    resolved = resolve([Layer("run.toml", {"recipe": "digits", "model": {"width": 32}})])
    assert resolved.config.epochs == RECIPES["digits"].defaults["epochs"]
    assert resolved.config.model == {"width": 32, "layers": 2}
    assert resolved.origin["model.width"] == "run.toml"
    assert resolved.origin["model.layers"] == "recipe digits"


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_has_an_origin(name: str) -> None:
    resolved = resolve([Layer("the command line", {"recipe": name})])
    assert set(resolved.origin) == {key for key, _ in flatten(resolved.config.model_dump())}
    assert set(resolved.origin.values()) == {"default", f"recipe {name}", "the command line"}


def test_resolving_leaves_the_recipes_defaults_as_they_were() -> None:
    before = to_toml(resolve([]).config)
    with_set("optimizer.args.weight_decay=0.7", "model.layers=9", "schedule.final=0.9")
    assert to_toml(resolve([]).config) == before


@pytest.mark.parametrize(
    ("earlier", "later", "taken_back"),
    [
        ({"steps": 100}, {"epochs": 3}, "steps"),
        ({"epochs": 3}, {"steps": 100}, "epochs"),
        ({"global_batch": 64}, {"batch_per_device": 8}, "global_batch"),
        ({"batch_per_device": 8}, {"global_batch": 64}, "batch_per_device"),
    ],
)
def test_saying_it_the_other_way_takes_back_what_an_earlier_layer_said(
    earlier: dict[str, int], later: dict[str, int], taken_back: str
) -> None:
    resolved = resolve([Layer("run.toml", earlier), Layer("--set", later)])
    ((key, value),) = later.items()
    assert getattr(resolved.config, key) == value
    assert getattr(resolved.config, taken_back) is None
    assert resolved.origin[key] == "--set"
    assert resolved.origin[taken_back] == "default"


def test_one_more_decided_value_is_checked_and_says_where_it_came_from() -> None:
    resolved = resolve([]).with_value("data.workers", 3, "the CPUs of a rank")
    assert resolved.config.data.workers == 3
    assert resolved.origin["data.workers"] == "the CPUs of a rank"
    with pytest.raises(UserError, match=r"data\.workers = -1 \(from a guess\) is not valid"):
        resolved.with_value("data.workers", -1, "a guess")


# Mistakes ------------------------------------------------------------------------------------------------------------

MISTAKES = [
    # unknown names
    (["globl_batch=8"], "unknown key 'globl_batch' (from --set): did you mean 'global_batch'?"),
    (["optimizer.lrr=1"], "unknown key 'optimizer.lrr' (from --set): did you mean 'optimizer.lr'?"),
    (["optimiser.lr=1"], "unknown key 'optimiser' (from --set): did you mean 'optimizer.lr'?"),
    (["lr=1"], "unknown key 'lr' (from --set): did you mean 'optimizer.lr'?"),
    (["workers=1"], "unknown key 'workers' (from --set): did you mean 'data.workers'?"),
    (["model.layrs=2"], "unknown key 'model.layrs' (from --set): did you mean 'model.layers'?"),
    (["layers=2"], "unknown key 'layers' (from --set): did you mean 'model.layers'?"),
    (["pipeline.schedul=1f1b"], "unknown key 'pipeline.schedul' (from --set): did you mean 'pipeline.schedule'?"),
    (["cuts=['h.2']"], "unknown key 'cuts' (from --set): did you mean 'pipeline.cuts'?"),
    (["recipe=lmm"], "unknown recipe 'lmm': did you mean 'lm'?"),
    (["recipe=resnet"], "unknown recipe 'resnet': choose one of lm, digits, linear, wikitext2, mnist, cifar10"),
    # wrong types
    (["recipe=3"], "recipe = 3 (from --set) is not valid: it has to be text"),
    (["global_batch=abc"], "global_batch = 'abc' (from --set) is not valid: it has to be a whole number"),
    (["global_batch=true"], "global_batch = True (from --set) is not valid: it has to be a whole number"),
    (["global_batch=[1, 2]"], "global_batch = [1, 2] (from --set) is not valid: it has to be a whole number"),
    (["steps=1.5"], "steps = 1.5 (from --set) is not valid: it has to be a whole number"),
    (["epochs=2.0"], "epochs = 2.0 (from --set) is not valid: it has to be a whole number"),
    (["clip=big"], "clip = 'big' (from --set) is not valid: it has to be a number"),
    (["share_gpu=1"], "share_gpu = 1 (from --set) is not valid: it has to be true or false"),
    (["data.path=3"], "data.path = 3 (from --set) is not valid: it has to be text"),
    (
        ["pipeline.cuts=blocks.2"],
        "pipeline.cuts = 'blocks.2' (from --set) is not valid: it has to be a list, as in "
        "--set 'pipeline.cuts=[\"...\"]'",
    ),
    (
        ["optimizer=adamw"],
        "optimizer = 'adamw' (from --set) is not valid: it has to be a table, set key by key",
    ),
    (
        ["optimizer.args=3"],
        "optimizer.args = 3 (from --set) is not valid: it has to be a table, set key by key",
    ),
    (
        ["model=3"],
        "model = 3 (from --set) is not valid: it has to be a table, set key by key",
    ),
    (["model.layers=true"], "model.layers = True (from --set) is not valid: it has to be a whole number"),
    (["model.dropout=x"], "model.dropout = 'x' (from --set) is not valid: it has to be a number"),
    # out of range
    (["global_batch=-1"], "global_batch = -1 (from --set) is not valid: it has to be greater than 0"),
    (["steps=0"], "steps = 0 (from --set) is not valid: it has to be greater than 0"),
    (["seed=-1"], "seed = -1 (from --set) is not valid: it has to be greater than or equal to 0"),
    (["data.workers=-1"], "data.workers = -1 (from --set) is not valid: it has to be greater than or equal to 0"),
    (["optimizer.lr=nan"], "optimizer.lr = nan (from --set) is not valid: it has to be a finite number"),
    (["schedule.final=2"], "schedule.final = 2 (from --set) is not valid: it has to be less than or equal to 1"),
    (["precision=fp8"], "precision = 'fp8' (from --set) is not valid: it has to be 'fp32', 'bf16' or 'fp16'"),
    (
        ["schedule.name=poly"],
        "schedule.name = 'poly' (from --set) is not valid: it has to be 'constant', 'linear' or 'cosine'",
    ),
    (
        ["pipeline.schedule=1f1c"],
        "pipeline.schedule = '1f1c' (from --set) is not valid: it has to be 'gpipe', '1f1b', 'interleaved-1f1b', "
        "'looped-bfs', 'interleaved-zero-bubble', 'zbv' or 'dualpipev'",
    ),
    (
        ["pipeline.micro_batches=0"],
        "pipeline.micro_batches = 0 (from --set) is not valid: it has to be greater than 0",
    ),
    # contradictions
    (["steps=3", "epochs=2"], "steps and epochs contradict each other: say one of them"),
    (
        ["global_batch=8", "batch_per_device=2"],
        "global_batch and batch_per_device contradict each other: say one of them",
    ),
    (["micro_batch=64"], "micro_batch 64 is larger than global_batch 16: lower one of them"),
    (["schedule.warmup_steps=700"], "schedule.warmup_steps 700 leaves nothing of 700 steps: shorten one"),
    (["model.heads=5"], "model.width 96 is not divisible by heads 5: make it a multiple of heads"),
    (
        ["share_gpu=true", "backend=nccl"],
        "share_gpu and backend nccl contradict each other: nccl refuses two ranks on one GPU",
    ),
    (["device=cpu", "backend=nccl"], "backend nccl needs device cuda: leave backend out on CPUs"),
    (["device=cpu", "share_gpu=true"], "share_gpu and device cpu contradict each other: say one of them"),
    # text with a form of its own
    (
        ["validate_every=soon"],
        'validate_every: write "100 steps", "1 epoch", "10 minutes" or "never", not \'soon\'',
    ),
    (["save_every=0 steps"], "save_every: '0 steps' is not a positive number of steps"),
    (["layout=dp=x"], "dp=x in layout 'dp=x' is not a size: sizes are whole numbers from 1, or auto"),
    (["layout=fdsp=2"], "unknown axis in layout 'fdsp=2': 'fdsp': did you mean 'fsdp'?"),
]


@pytest.mark.parametrize(("assignments", "sentence"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake_is_one_sentence_with_the_nearest_name_or_what_would_be_right(
    assignments: list[str], sentence: str
) -> None:
    assert refusal_of(*assignments) == sentence


@pytest.mark.parametrize(
    "assignments",
    [
        *(case[0] for case in MISTAKES),
        ["model.prompt="],
        ["model.dropout=1"],
        ["name=2024-01-01"],
        ["timeout_minutes=0"],
        ["x.y.z=1"],
        ["=1"],
        ["nothing"],
        ["optimizer=1", "optimizer.lr=2"],
    ],
    ids=" ".join,
)
def test_a_sentence_has_a_cause_and_a_fix_on_one_line_and_no_words_of_the_validator(assignments: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        with_set(*assignments)
    assert refusal.value.cause
    assert refusal.value.fix
    for jargon in JARGON:
        assert jargon not in str(refusal.value)


@pytest.mark.parametrize(
    ("assignment", "key"),
    [("steps.foo=1", "steps"), ("seed.x=1", "seed"), ("schedule.warmup_steps.a=1", "schedule.warmup_steps")],
)
def test_a_value_that_is_given_keys_of_its_own_is_refused_by_name(assignment: str, key: str) -> None:
    assert key in refusal_of(assignment)


@pytest.mark.parametrize("table", ["optimizer", "optimizer.args", "data", "model"])
def test_a_table_that_a_file_made_a_value_is_refused_whatever_comes_later(table: str) -> None:
    layers = [
        Layer("run.toml", parse_assignments([f"{table}=3"])),
        Layer("--set", parse_assignments([f"{table}.something=1"])),
    ]
    with pytest.raises(UserError, match=table):
        resolve(layers)


def test_a_mistake_says_which_file_it_stands_in() -> None:
    with pytest.raises(UserError, match=r"^unknown key 'stepz' \(from run\.toml\): did you mean 'steps'\?$"):
        resolve([Layer("run.toml", {"stepz": 3}), Layer("--set", {"seed": 1})])


def test_arguments_of_init_and_options_of_run_are_checked_in_the_same_words() -> None:
    assert launch_config({"layout": "fsdp=2"}).layout == "fsdp=2"
    assert script_config({"script": "train.py", "args": ["--lr", "3"], "steps": 5}, "the command line").steps == 5
    with pytest.raises(UserError, match=r"^timeout_minutes = 0 is not valid: it has to be greater than 0$"):
        launch_config({"timeout_minutes": 0})
    with pytest.raises(UserError, match=r"^cannot read 'two' in layout 'two': write axis=size"):
        launch_config({"layout": "two"})
    with pytest.raises(UserError, match=r"^steps = 0 \(from the command line\) is not valid: it has to be greater"):
        script_config({"script": "train.py", "steps": 0}, "the command line")


# How often -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("100 steps", Cadence(100, "steps")),
        ("1 step", Cadence(1, "steps")),
        ("1e3 steps", Cadence(1000, "steps")),
        ("1 epoch", Cadence(1, "epochs")),
        ("0.5 epochs", Cadence(0.5, "epochs")),
        (" 2  epochs ", Cadence(2, "epochs")),
        ("10 minutes", Cadence(10, "minutes")),
        ("1.5 minutes", Cadence(1.5, "minutes")),
        ("never", Cadence(math.inf, "never")),
    ],
)
def test_how_often_is_said_in_steps_epochs_or_minutes(text: str, cadence: Cadence) -> None:
    assert Cadence.parse(text) == cadence


@pytest.mark.parametrize(
    "text",
    [
        *("", "often", "100", "steps", "100 hours", "100steps", "steps 100", "every 3 steps", "1 stepss"),
        *("0 steps", "-1 steps", "1.5 steps", "0 epochs", "-0.5 epochs", "nan epochs", "inf minutes", "never ever"),
    ],
)
def test_any_other_way_to_say_how_often_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write \"100 steps\"|is not a positive number of"):
        Cadence.parse(text)


@pytest.mark.parametrize(
    ("text", "steps_per_epoch", "due"),
    [
        ("1 step", 5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ("5 steps", 4, [5, 10]),
        ("5 steps", None, [5, 10]),
        ("1 epoch", 4, [4, 8, 12]),
        ("2 epochs", 3, [6, 12]),
        ("0.5 epochs", 4, [2, 4, 6, 8, 10, 12]),
        ("0.25 epochs", 12, [3, 6, 9, 12]),
        ("0.01 epochs", 6, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        ("1 epoch", None, []),
        ("never", 4, []),
    ],
)
def test_steps_and_epochs_are_due_at_their_multiples(text: str, steps_per_epoch: int | None, due: list[int]) -> None:
    cadence = Cadence.parse(text)
    assert [step for step in range(1, 13) if cadence.due(step, steps_per_epoch, minutes_since_last=1e9)] == due


@pytest.mark.parametrize(("text", "times"), [("0.5 epochs", 2), ("0.25 epochs", 4), ("0.1 epochs", 10)])
@pytest.mark.parametrize("steps_per_epoch", [10, 13, 25, 57])
def test_a_part_of_an_epoch_is_due_as_often_as_it_fits_and_at_every_epochs_end(
    text: str, times: int, steps_per_epoch: int
) -> None:
    cadence, epochs = Cadence.parse(text), 8
    due = [step for step in range(1, epochs * steps_per_epoch + 1) if cadence.due(step, steps_per_epoch, 0)]
    assert len(due) == times * epochs
    assert set(range(steps_per_epoch, epochs * steps_per_epoch + 1, steps_per_epoch)) <= set(due)


@pytest.mark.parametrize(("minutes", "due"), [(0, False), (9.99, False), (10, True), (25, True)])
def test_minutes_are_due_once_they_have_passed(minutes: float, due: bool) -> None:
    assert Cadence.parse("10 minutes").due(7, 4, minutes) is due


# --set and files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "values"),
    [
        ("seed=3", {"seed": 3}),
        ("clip=1e-3", {"clip": 1e-3}),
        ("clip=-0.5", {"clip": -0.5}),
        ("recompute=true", {"recompute": True}),
        ("recompute = false", {"recompute": False}),
        ("optimizer.lr=0.01", {"optimizer": {"lr": 0.01}}),
        ("optimizer.args.betas=[0.9, 0.99]", {"optimizer": {"args": {"betas": [0.9, 0.99]}}}),
        ("optimizer.args={nesterov = true}", {"optimizer": {"args": {"nesterov": True}}}),
        ("name=first try", {"name": "first try"}),
        ('name="3"', {"name": "3"}),
        ("name=", {"name": ""}),
        ("data.path=/data/a=b.txt", {"data": {"path": "/data/a=b.txt"}}),
        ("layout=dp=2", {"layout": "dp=2"}),
        ("layout=dp=2,fsdp=4", {"layout": "dp=2,fsdp=4"}),
        ("save_every=100 steps", {"save_every": "100 steps"}),
    ],
)
def test_what_is_set_is_read_as_number_list_or_truth_where_it_is_one_and_else_as_text(
    assignment: str, values: dict[str, Any]
) -> None:
    read = parse_assignments([assignment])
    assert read == values
    assert repr(read) == repr(values), "true is not 1"


def test_several_assignments_make_one_layer_and_the_last_of_a_key_counts() -> None:
    assert parse_assignments(["optimizer.lr=1", "seed=2", "optimizer.name=sgd", "seed=3"]) == {
        "optimizer": {"lr": 1, "name": "sgd"},
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("assignments", "sentence"),
    [
        (["seed"], "cannot read --set 'seed': write --set key=value, as in --set optimizer.lr=0.01"),
        (["=3"], "cannot read --set '=3': write --set key=value, as in --set optimizer.lr=0.01"),
        ([""], "cannot read --set '': write --set key=value, as in --set optimizer.lr=0.01"),
        (
            ["optimizer=sgd", "optimizer.lr=1"],
            "--set optimizer.lr contradicts another --set: a key is either a value or a table",
        ),
    ],
)
def test_an_assignment_that_cannot_be_read_is_refused(assignments: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_assignments(assignments)
    assert str(refusal.value) == sentence


def test_a_config_file_that_is_missing_or_malformed_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = \n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name, cause in (
        ("missing.toml", "cannot read config"),
        (".", "cannot read config"),
        ("broken.toml", "is not TOML"),
        ("binary.toml", "is not TOML"),
    ):
        with pytest.raises(UserError) as refusal:
            read_toml(tmp_path / name)
        assert cause in refusal.value.cause
        assert str(tmp_path / name) in refusal.value.cause
        assert "\n" not in str(refusal.value)


ROUND_TRIPS = [
    [],
    ["epochs=3"],
    ["steps=1000"],
    ["batch_per_device=16"],
    ["name=first try", 'data.path=/data/with "quotes" and \\ and tab\t'],
    ["name=Größe 大きさ"],
    ["optimizer.name=sgd", "optimizer.lr=1e-10", "optimizer.args={momentum = 0.9, nesterov = true}"],
    ["optimizer.lr=1e22", "clip=0.1", "optimizer.args.eps=1e-12"],
    ["optimizer.args={groups = [{lr = 0.1}, {lr = 0.2}], names = ['a', 'b']}"],
    ["data.workers=0", "data.shuffle=false", "share_gpu=true", "recompute=true"],
    ["layout=dp=2,fsdp=2", "validate_every=never", "save_every=0.5 epochs", "precision=bf16"],
    ["layout=pp=2", "pipeline.schedule=zbv", "pipeline.micro_batches=8", "pipeline.cuts=['blocks.1', 'norm']"],
]


@pytest.mark.parametrize("assignments", ROUND_TRIPS, ids=["; ".join(case) or "as it is" for case in ROUND_TRIPS])
@pytest.mark.parametrize("name", RECIPES)
def test_a_stored_config_reads_back_as_the_same_config(tmp_path: Path, name: str, assignments: list[str]) -> None:
    config = with_set(f"recipe={name}", *assignments).config
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert from_toml(path) == config
    assert to_toml(from_toml(path)) == to_toml(config)


def test_a_stored_config_does_not_take_up_again_what_it_had_dropped_of_its_recipe(tmp_path: Path) -> None:
    config = Config(recipe="lm", steps=5, global_batch=4, model=resolve([]).config.model)
    assert RECIPES["lm"].defaults["clip"] is not None
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "config.toml") == config


@pytest.mark.parametrize("number", [*range(0x20), 0x22, 0x5C, 0x7F, 0x85, 0x2028, 0xFFFD, 0x1F600])
def test_any_character_survives_in_text(tmp_path: Path, number: int) -> None:
    config = resolve([Layer("the command line", {"data": {"path": f"a{chr(number)}b"}})]).config
    (tmp_path / "config.toml").write_bytes(to_toml(config).encode())
    assert from_toml(tmp_path / "config.toml").data.path == f"a{chr(number)}b"


def test_every_value_is_in_the_stored_config_and_the_unset_ones_as_comments(tmp_path: Path) -> None:
    text = to_toml(resolve([]).config)
    for key in Config.model_fields:
        assert f"\n{key} = " in f"\n{text}" or f"# {key} is unset" in text or f"[{key}]" in text
    assert "# epochs is unset" in text
    (tmp_path / "config.toml").write_text(text)
    assert "epochs" not in read_toml(tmp_path / "config.toml")


# Settling on a number of processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "world_size", "global_batch", "source"),
    [
        ("dp=auto", 1, 8, "batch_per_device 8 x 1 replicas"),
        ("dp=auto", 4, 32, "batch_per_device 8 x 4 replicas"),
        ("dp=2,fsdp=auto", 4, 32, "batch_per_device 8 x 4 replicas"),
    ],
)
def test_a_batch_per_device_becomes_a_global_batch_that_says_how(
    layout: str, world_size: int, global_batch: int, source: str
) -> None:
    settled = for_world(with_set("batch_per_device=8", f"layout={layout}"), world_size)
    assert settled.config.global_batch == global_batch
    assert settled.config.batch_per_device is None
    assert settled.origin["global_batch"] == source


def test_a_global_batch_is_the_same_on_any_number_of_processes() -> None:
    for world_size in (1, 2, 3, 4):
        settled = for_world(with_set("global_batch=32"), world_size)
        assert settled.config.global_batch == 32
        assert settled.origin["global_batch"] == "--set"


def test_an_auto_layout_is_stored_as_what_it_became_and_says_from_what() -> None:
    settled = for_world(resolve([]), 4)
    assert settled.config.layout == "dp=4"
    assert settled.origin["layout"] == "dp=auto on 4 processes"


def test_a_layout_that_fits_as_it_stands_keeps_its_origin() -> None:
    settled = for_world(with_set("layout=fsdp=2"), 2)
    assert (settled.config.layout, settled.origin["layout"]) == ("fsdp=2", "--set")


def test_a_layout_that_does_not_fit_the_processes_is_refused() -> None:
    with pytest.raises(UserError, match=r"^layout dp=3 needs 3 processes but there are 2: "):
        for_world(with_set("layout=dp=3"), 2)


def test_a_batch_per_device_that_cannot_hold_a_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"^micro_batch 8 is larger than global_batch 4: lower one of them$"):
        for_world(with_set("batch_per_device=2", "micro_batch=8"), 2)


def test_a_batch_per_device_makes_the_micro_batch_of_a_recipe_smaller() -> None:
    assert for_world(with_set("batch_per_device=2"), 2).config.micro_batch == 4


def test_what_a_recipe_chose_gives_way_to_a_smaller_run() -> None:
    resolved = resolve([Layer("the command line", {"steps": 10, "global_batch": 4})])
    assert resolved.config.schedule.warmup_steps == 1
    assert resolved.origin["schedule.warmup_steps"] == "recipe lm, shortened to fit 10 steps"
    assert resolved.config.micro_batch == 4


def test_what_the_user_chose_does_not_give_way() -> None:
    with pytest.raises(UserError, match=r"schedule\.warmup_steps 20 leaves nothing of 10 steps"):
        resolve([Layer("a file", {"steps": 10, "schedule": {"warmup_steps": 20}})])


def test_a_value_can_be_taken_away() -> None:
    assert resolve([Layer("--set", parse_assignments(["clip=unset"]))]).config.clip is None
