"""`lockstep plan`, as a user runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.config.layers import Layer, parse_assignments, resolve
from lockstep.planner.cost.job import Job
from lockstep.planner.show.search_table import MOST_ROWS
from lockstep.planner.trace import count as trace
from tests.cli.commands import in_this_process, run

WIDE = {"COLUMNS": "100"}


def test_a_layout_is_shown_term_by_term(tmp_path: Path) -> None:
    done = in_this_process(tmp_path, "plan", "gpt2-xl", "--cluster", "A100-80", "--layout", "pp=2,fsdp=4", **WIDE)
    assert done.returncode == 0, done.stderr
    for words in (
        "gpt2-xl, 1.56 B parameters, on 8 x A100-SXM-80 (one node)",
        "first stage",
        "last stage",
        "optimizer state",
        "fits: ",
        "products and attention",
        "idle in the pipeline's bubble",
        "tokens/s",
        "MFU ",
        "GPU-hours",
        "kWh",
        "bottleneck: ",
        "lockstep train CONFIG.toml --layout pp=2,fsdp=4 --set",
    ):
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(("lockstep ", "-", "bott"))) <= 100


def test_json_has_the_same_numbers_and_what_to_paste(tmp_path: Path) -> None:
    done = in_this_process(
        tmp_path, "plan", "llama-3-8b", "--cluster", "64xH100", "--layout", "fsdp=64", "--recompute", "full", "--json"
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["gpus"], plan["layout"], plan["memory"]["verdict"]) == (64, "fsdp=64", "fits")
    stage = plan["memory"]["stages"][0]
    terms = ("parameters", "gradients", "optimizer", "activations", "logits", "communication", "slack")
    assert sum(stage[term] for term in terms) - stage["shared"] == pytest.approx(plan["memory"]["total"])
    assert sum(plan["time"]["terms"].values()) == pytest.approx(plan["time"]["step"])
    assert plan["time"]["tokens_per_second"] == pytest.approx(plan["global_batch"] * 8192 / plan["time"]["step"])
    # 3 x 2 FLOPs for every weight of a product and token, and causal attention.
    assert 0.2 < plan["time"]["mfu"] < 0.7
    settings = [f"{key}={value}" for key, value in plan["settings"].items()]
    config = resolve([Layer("--set", {**parse_assignments(settings), "layout": plan["layout"]})]).config
    assert config.recompute
    assert config.shard.level == "zero3"
    assert "fits" in done.stderr


def test_tokens_and_gpu_hours_follow_from_the_step(tmp_path: Path) -> None:
    done = in_this_process(
        tmp_path, "plan", "gpt2", "--cluster", "H100", "--layout", "dp=8", "--tokens", "1e10", "--json"
    )
    time_ = json.loads(done.stdout)["time"]
    assert time_["gpu_hours"] == pytest.approx(1e10 / time_["tokens_per_second"] * 8 / 3600)
    assert time_["kilowatt_hours"] == pytest.approx(time_["gpu_hours"] * time_["watts_per_gpu"] / 1000)
    # Between idle and full load, with the rest of the node.
    assert 70 + 0.8 * 700 <= time_["watts_per_gpu"] <= 1.8 * 700


def test_the_cost_of_a_training_is_told_of_the_best_layout_as_well(tmp_path: Path) -> None:
    arguments = ("plan", "gpt2", "--cluster", "8xH100", "--tokens", "1e12", "--json")
    done = in_this_process(tmp_path, *arguments)
    plan = json.loads(done.stdout)
    assert re.search(r"^1 T tokens: .* GPU-hours", done.stderr, re.MULTILINE)
    hours = 1e12 / plan["ranked"][0]["tokens_per_second"] * 8 / 3600
    assert plan["time"]["gpu_hours"] == pytest.approx(hours)


def test_a_tp_that_leaves_the_node_comes_with_a_warning(tmp_path: Path) -> None:
    arguments = ("plan", "llama-3-405b", "--cluster", "A100-40", "--layout", "fsdp=64,tp=8", "--global-batch", "64")
    done = in_this_process(tmp_path, *arguments, "--json")
    assert "network" not in done.stderr
    profile = '[node]\ncount = 128\ngpus = 4\ngpu = "A100-40"\nnetwork_gb_s = 50\n'
    (tmp_path / "small.toml").write_text(profile)
    done = in_this_process(tmp_path, *arguments[:3], "small.toml", *arguments[4:], "--json")
    warning = "tp=8 is larger than a node of 4 GPUs, so that every block waits for the network: tp=4 stays inside"
    assert f"- {warning}" in done.stderr
    assert warning in json.loads(done.stdout)["remarks"]


def test_without_a_layout_all_are_compared_and_the_best_can_be_pasted(tmp_path: Path) -> None:
    done = in_this_process(
        tmp_path, "plan", "llama-3-8b", "--cluster", "H100", "--nodes", "2", "--chart", "front.svg", **WIDE
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\S*(?:dp|fsdp|tp|pp|cp)=\S+ .* %", done.stdout, re.MULTILINE)
    assert len(rows) >= MOST_ROWS
    assert "candidates: " in done.stdout
    assert "Pareto front" in done.stdout
    command = done.stdout.split("lockstep train CONFIG.toml ")[1].split()
    assert command[0] == "--layout"
    assert command[1] == rows[0].split()[0]
    values = parse_assignments([word for word in command[2:] if word != "--set" and "=" in word])
    assert resolve([Layer("--set", {**values, "layout": command[1]})]).config.micro_batch == int(rows[0].split()[1])
    ElementTree.parse(tmp_path / "front.svg")


def test_what_does_not_fit_comes_with_ways_that_do(tmp_path: Path) -> None:
    done = in_this_process(tmp_path, "plan", "llama-3-8b", "--cluster", "H100", "--layout", "dp=8", "--json")
    assert done.returncode == 1
    plan = json.loads(done.stdout)
    assert plan["memory"]["verdict"] == "does not fit"
    assert len(plan["ways"]) == 3
    assert all(way["memory"] * (1 + way["band"]) <= plan["memory"]["capacity"] for way in plan["ways"])
    assert "ways to make it fit, the fastest first, those with more GPUs last:" in done.stderr
    assert "% time" in done.stderr


def test_where_nothing_fits_the_number_of_gpus_that_would_do_is_named(tmp_path: Path) -> None:
    done = in_this_process(tmp_path, "plan", "llama-3-70b", "--cluster", "H100")
    assert done.returncode == 1
    assert "nothing fits" in done.stdout
    assert re.search(r"the least that any takes is \S+ GB \(.*\), and a GPU has 84.4 GB", done.stdout)
    found = re.findall(r"it fits on [\d,]+.*?: (--gpus \d+ --layout .*? --global-batch \d+)", done.stdout)
    assert found
    assert "(the smallest number on which it does): --gpus" in done.stdout
    for options in found:
        again = in_this_process(tmp_path, "plan", "llama-3-70b", "--cluster", "H100", *options.split())
        assert again.returncode == 0, (options, again.stdout)


def test_scaling_curves_with_checkpoints(tmp_path: Path) -> None:
    arguments = ("plan", "llama-3-8b", "--cluster", "H100", "--scale", "1..128", "--chart", "curves.svg", "--json")
    done = in_this_process(tmp_path, *arguments, "--save-seconds", "30", "--mtbf-hours", "1000", **WIDE)
    assert done.returncode == 0, done.stderr
    curves = json.loads(done.stdout)
    assert [point["gpus"] for point in curves["strong"]] == [2**power for power in range(8)]
    assert len({point["global_batch"] for point in curves["strong"]}) == 1
    last = curves["savings"][-1]
    # 16 nodes that each fail every 1000 hours.
    assert last["between_failures"] == pytest.approx(1000 * 3600 / 16)
    assert last["save"] == 30
    assert 0.9 < last["goodput"] < 1
    assert "strong scaling" in done.stderr
    assert "weak scaling" in done.stderr
    ElementTree.parse(tmp_path / "curves.svg")


def test_the_save_cost_of_a_run_is_read_from_its_events(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    common = {"time": 1.0, "attempt": 1}
    start = {**common, "kind": "start", "nodes": 1}
    saved = {"step": 1, "path": "checkpoints/step-00000001", "seconds": 2.0, "stall": 0.5, "bytes": 4_000_000_000}
    lines = [start, {**common, "kind": "checkpoint", "best": True, **saved}]
    (run_folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = in_this_process(tmp_path, "plan", "gpt2", "--cluster", "H100", "--scale", "8..8", "--run", "run", "--json")
    assert done.returncode == 0, done.stderr
    # 12 bytes of each of 124 M parameters at 2 GB/s, of which a quarter is waited for.
    assert json.loads(done.stdout)["savings"][0]["save"] == pytest.approx(12 * 124_439_808 / 2e9 / 4)


@pytest.mark.parametrize("layout", [("--layout", "fsdp=8"), ()])
def test_the_arithmetic_is_explained_beside_that_of_a_course_and_of_zero(tmp_path: Path, layout: tuple[str]) -> None:
    done = in_this_process(tmp_path, "plan", "gpt2-xl", "--cluster", "A100-80", *layout, "--explain")
    assert done.returncode == 0, done.stderr
    assert "what a rank holds at its fullest moment" in done.stdout
    assert "the course prints 6 + 6 + 18 + 56.43" in done.stdout
    for size in ("120.0 GB", "31.4 GB", "16.6 GB", "1.9 GB"):
        assert size in done.stdout


def test_a_trace_stands_beside_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(job: Job, build: object) -> trace.Traced:
        assert build is None, "a model that is known by its numbers"
        assert job.layout.fsdp == 8
        return trace.Traced(1000, 2000, 4000, 9000, 500, 0, "backward", 0, 0, (), 2, 3.5, 300_000_000)

    monkeypatch.setattr(trace, "trace_memory", traced)
    shape = "layers=2,hidden=64,heads=4,vocab=512,sequence=64"
    done = in_this_process(
        tmp_path, "plan", shape, "--cluster", "H100", "--layout", "fsdp=8", "--global-batch", "8", "--trace", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert "cut for real" in done.stderr
    assert "found in 3.5 s, in a process of 300 MB" in done.stderr
    assert json.loads(done.stdout)["trace"]["total"] == 16500


@pytest.mark.limit(30)
def test_no_torch_and_no_waiting_for_what_is_known_by_its_numbers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 256, "vocab_size": 512}))
    script = """
import contextlib, io, sys
from lockstep.cli import main
for model in ("llama-3-8b", "config.json", "lm"):
    sys.argv = ["lockstep", "plan", model, "--cluster", "8xH100", "--global-batch", "32"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    assert "lockstep train" in said.getvalue(), said.getvalue()
    assert "torch" not in sys.modules, model
"""
    done = run(tmp_path, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("gpt2", "--cluster is missing: name what is planned for, as in --cluster 64xH100"),
        ("gpt3 --cluster H100", "unknown model 'gpt3': did you mean"),
        ("gpt2 --cluster H10", "unknown cluster 'H10': did you mean"),
        ("gpt2 --cluster H100 --layout tp=8", "tp=8 does not divide the 12 heads of gpt2: use tp=4, tp=6 or tp=12"),
        ("gpt2 --cluster H100 --layout pp=16", "pp=16 needs 16 blocks at least, and gpt2 has 12: use pp=8"),
        ("gpt2 --cluster H100 --layout dp=8 --global-batch 4", "leaves 4 of 8 data ranks (dp=8) without a sample"),
        ("gpt2 --cluster H100 --gpus 8 --layout dp=4", "needs 4 GPUs but there are 8: use --gpus 4, or layout dp=8"),
        ("gpt2 --cluster 64xH100 --layout dp=8", "needs 8 GPUs but there are 64: use --gpus 8, or layout"),
        ("gpt2 --cluster H100 --layout cp=2,pp=2", "has both cp and pp"),
        ("gpt2 --cluster V100 --precision bf16", "V100-SXM2-32 has no bf16 products: use --precision fp16 or fp32"),
        ("gpt2 --cluster H100 --recompute some", "unknown --recompute 'some': choose one of none, full"),
        ("gpt2 --cluster H100 --set shard.levl=zero1", "unknown key 'shard.levl' (from --set): did you mean"),
        ("gpt2 --cluster H100 --set layer=3", "did you mean 'layers'?"),
        ("gpt2 --cluster H100 --layout dp=8 --search", "--search compares all layouts, and --layout names one"),
        ("gpt2 --cluster H100 --trace", "--trace is about one layout: name it"),
        ("gpt2 --cluster H100 --layout pp=4 --trace", "the trace cannot do pp=4"),
        ("gpt2 --cluster H100 --scale 8", "cannot read --scale 8: write it as 1..16384"),
        ("gpt2 --cluster H100 --save-seconds 8", "--save-seconds goes with --scale: say that as well"),
        ("gpt2 --cluster H100 --scale 1..8 --run nowhere", "nowhere is not a run folder"),
        ("gpt2 --cluster H100 --scale 1..8 --layout dp=8", "--layout is about one size, and --scale goes over many"),
        ("gpt2 --cluster H100 --scale 1..8 --explain", "--explain is about one size, and --scale goes over many"),
        ("gpt2 --cluster H100 --scale 1..8 --trace", "--trace is about one size"),
        ("gpt2 --cluster H100 --scale 1..8 --search", "--search is about one size"),
        ("gpt2 --cluster H100 --scale 1..8 --tokens 1e9", "--tokens is about one size"),
        ("gpt2 --cluster H100 --scale 1..13", "13 GPUs cannot be shared out evenly over nodes of 8: use 8 or 16 GPUs"),
        ("gpt2 --mtbf-hours 100 --scale 1..8", "--cluster is missing"),
        ("gpt2 --cluster H100 --tokens 0", "--tokens 0 is no amount: say how many"),
        ("gpt2 --cluster H100 --layout dp=8 --tokens nan --json", "--tokens nan is no amount"),
        ("gpt2 --cluster H100 --scale 1..8 --save-seconds nan", "--save-seconds nan is no amount"),
        ("gpt2 --cluster H100 --scale 1..8 --mtbf-hours inf", "--mtbf-hours inf is no amount"),
        ("gpt2 --cluster TPUv4", "Lockstep does not run on TPUv4: name a GPU"),
        ("gpt2 --cluster H100 --seq 4096", "use at most 1024 tokens, or --set positions=4096"),
        (
            "gpt2 --cluster H100 --layout pp=4,dp=2 --schedule zbv --set compile=blocks",
            "schedule zbv splits the backward of a block, which compiled code cannot do: use --set compile=off",
        ),
        ("gpt2 --cluster H100 --layout dp=8 --chart x.svg", "--chart draws many layouts, and --layout names one"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(tmp_path: Path, arguments: str, says: str) -> None:
    done = in_this_process(tmp_path, "plan", *arguments.split())
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
