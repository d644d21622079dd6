"""Tensor and context parallelism, and layouts that are chosen, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import events, lockstep

SCRIPT = """
import sys
import lockstep, torch
import torch.nn.functional as F
from torch import nn

heads = 6 if "six" in sys.argv else 4
length = 10 if "short" in sys.argv else 8

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        tokens = torch.randint(20, (length + 1,), generator=torch.Generator().manual_seed(i))
        return {"x": tokens[:-1], "y": tokens[1:]}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.gate = nn.Linear(24, 2)
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        h = self.norm2(x)
        return x + self.gate(h).softmax(-1)[..., :1] * self.down(F.gelu(self.up(h)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 24)
        self.places = nn.Embedding(length, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 20)
    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, batch):
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return total, batch["y"].numel()

run = lockstep.init()
engine = run.setup(Model, loss, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), clip=1.0)
for batch in run.loader(Texts(), global_batch=1 if "one" in sys.argv else 8, steps=3):
    engine.step(batch)
"""
"""A small language model: four heads, or `six`; 8 tokens, or 10 (`short`); 8 samples a step, or `one`."""

PICTURES = """
import lockstep, torch
from torch import nn

run = lockstep.init()
engine = run.setup(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
    lambda model, x: (model(x).square().sum(), len(x)),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
)
for batch in run.loader(torch.randn(40, 6), global_batch=8):
    engine.step(batch)
"""
"""A model without sequences."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pictures.py").write_text(PICTURES)
    return tmp_path


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "tp=2,pp=2"])
def test_a_plain_script_is_proved(folder: Path, layout: str) -> None:
    done = lockstep(folder, "verify", "script.py", "--layout", layout, "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"]
    assert " gives the numbers of one process: 2 steps" in result["verdict"]
    assert left_in(folder) == ["pictures.py", "script.py"]


def test_how_the_matrices_are_cut_is_explained(folder: Path) -> None:
    done = lockstep(folder, "verify", "script.py", "--layout", "tp=2", "--explain", "--json", COLUMNS="160")
    assert done.returncode == 0, done.stderr
    matrices = {row["name"]: row for row in json.loads(done.stdout)["tensor"]["modules"]}
    qkv, out, gate = (matrices[f"blocks.0.{name}"] for name in ("qkv", "out", "gate"))
    assert (qkv["role"], qkv["whole"], qkv["part"], qkv["parts"]) == ("column", [72, 24], [36, 24], [24, 24, 24])
    assert (out["role"], out["part"]) == ("row", [24, 12])
    line = 1 + next(number for number, text in enumerate(SCRIPT.splitlines()) if "softmax" in text)
    assert gate["role"] == "whole"
    assert gate["why"] == f"softmax goes along the dim that is cut (script.py:{line})"
    assert matrices["places"]["why"] == "a table of positions"
    shown = {row.split()[0]: row for row in done.stderr.splitlines() if "blocks.*" in row}
    assert "feeds down" in shown["column"]
    assert "takes in up; results are added up" in shown["row"]
    assert f"script.py:{line}" in shown["whole"]
    assert left_in(folder) == ["pictures.py", "script.py"]


@pytest.mark.slow
def test_a_recipe_says_which_layout_is_chosen_and_why(tmp_path: Path) -> None:
    done = lockstep(
        tmp_path, "train", "lm", "--layout", "auto", "--nproc", "2", "--steps", "2", "--set", "schedule.warmup_steps=1"
    )
    assert done.returncode == 0, done.stderr
    assert "layout dp=2: weights, gradients and optimizer state take " in done.stdout + done.stderr
    assert "replicas exchange the least" in done.stdout + done.stderr
    assert len(events(tmp_path / "runs" / "lm", "step")) == 2


@pytest.mark.slow
def test_a_script_is_given_a_layout_that_is_chosen(folder: Path) -> None:
    done = lockstep(folder, "run", "--layout", "auto", "--nproc", "2", "script.py", "one")
    assert done.returncode == 0, done.stderr
    assert "layout tp=2: a step has 1 sample for 2 ranks, and tp=2 divides its 4 heads" in done.stdout + done.stderr
    assert len(events(folder / "runs" / "script", "step")) == 3


REFUSED = [
    ("cp=2 script.py short", "a sequence of 10 tokens cannot be shared out over cp=2, two chunks a rank"),
    *(
        pytest.param(*one, marks=pytest.mark.slow)
        for one in (
            ("tp=4 script.py six", "blocks.0.qkv cannot be cut for tp=4: tp must divide 6 heads: 1, 2, 3 or 6"),
            ("cp=2 pictures.py", "the cp axis cuts sequences, and the batch has none"),
        )
    ),
]


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_what_cannot_be_cut_is_one_sentence_and_leaves_no_run(folder: Path, command: str, sentence: str) -> None:
    layout, *rest = command.split()
    done = lockstep(folder, "run", "--layout", layout, "--nproc", layout[-1], *rest)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]) == 1
    assert left_in(folder) == ["pictures.py", "script.py"]


@pytest.mark.slow
def test_a_role_for_a_matrix_that_is_not_there_is_refused(folder: Path) -> None:
    roles = 'tensor.roles={"blocks.*.mlp": "whole"}'
    done = lockstep(folder, "run", "--layout", "tp=2", "--nproc", "2", "--set", roles, "script.py")
    assert done.returncode == 2
    assert "tensor.roles names 'blocks.*.mlp', and the model has no matrix of that name" in done.stderr
    assert left_in(folder) == ["pictures.py", "script.py"]


@pytest.mark.slow
def test_a_role_is_given_on_the_command_line(folder: Path) -> None:
    roles = 'tensor.roles={"blocks.*.up": "whole"}'
    done = lockstep(folder, "verify", "script.py", "--layout", "tp=2", "--explain", "--json", "--set", roles)
    assert done.returncode == 0, done.stderr
    matrices = {row["name"]: row for row in json.loads(done.stdout)["tensor"]["modules"]}
    assert matrices["blocks.0.up"]["why"] == "tensor.roles says so"
