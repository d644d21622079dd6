"""What ranks compare of themselves: the script's own code, arguments, samples of any kind."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.digest import digest_of_value
from lockstep.errors import UserError
from lockstep.record.identity import Facts, LocalCode, Told, _shared_arguments, refuse_difference


def test_code_is_the_script_and_what_it_imports_that_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts").mkdir()
    for name in ("train.py", "helper_of_mine.py", "parts/__init__.py", "parts/late_part.py"):
        (tmp_path / name).write_text("LR = 0.1\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("helper_of_mine", "parts", "parts.late_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code = LocalCode()
    importlib.import_module("helper_of_mine")
    first = code.files()
    assert {"train.py", "helper_of_mine.py"} <= first.keys()
    assert "tests/unit/test_identity.py" in first, "outside the script's folder as it is imported"
    assert not any(name.startswith(("torch", "lockstep", "json", "numpy")) for name in first)
    (tmp_path / "helper_of_mine.py").write_text("LR = 0.3\n")
    importlib.import_module("parts.late_part")
    second = code.files()
    assert second["helper_of_mine.py"] == first["helper_of_mine.py"], "as it was when it was imported"
    assert {"parts/__init__.py", "parts/late_part.py"} <= second.keys() - first.keys()
    assert LocalCode().files()["helper_of_mine.py"] != first["helper_of_mine.py"]


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ("--lr 0.1 --rank 3 data", "--lr 0.1 data"),
        ("--local-rank=1 --lr 0.1", "--lr 0.1"),
        ("--local_rank 1 --node-id 7 --resume", "--resume"),
        ("--rank --lr 0.1", "--lr 0.1"),
        ("--ranking 3 --identity 4", "--ranking 3 --identity 4"),
    ],
)
def test_arguments_that_say_which_rank_it_is_are_not_compared(given: str, shared: str) -> None:
    assert " ".join(_shared_arguments(given.split())) == shared


FACTS: Facts = {
    "versions": {"torch": "2.13.0"},
    "code": {"train.py": "aa", "helper.py": "bb", "only_here.py": "cc"},
    "config": {"layout": "dp=2", "seed": "0"},
    "environment": {},
}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"versions": {"torch": "2.11.0"}}, "rank 3 on b has torch = 2.11.0 and rank 0 on a torch = 2.13.0: use one"),
        ({"code": {"train.py": "xx", "helper.py": "bb"}}, "rank 3 on b has another train.py than rank 0 on a: copy"),
        ({"code": {"train.py": "x", "helper.py": "y"}}, "rank 3 on b has another train.py and helper.py than rank 0"),
        (
            {"config": {"layout": "fsdp=2", "seed": "0"}},
            "rank 3 on b has layout = fsdp=2 and rank 0 on a layout = dp=2",
        ),
        ({"config": {"layout": "tp=2", "seed": "1"}}, "layout = dp=2 (seed differs too): say the same on all nodes"),
        (
            {"environment": {"NVIDIA_TF32_OVERRIDE": "0"}},
            "rank 3 on b has NVIDIA_TF32_OVERRIDE = 0 and rank 0 on a NVIDIA_TF32_OVERRIDE not set: set it alike",
        ),
    ],
)
def test_the_sentence_names_who_and_what_with_both_values(changed: Facts, sentence: str) -> None:
    told = [Told(0, "a", FACTS), Told(2, "b", FACTS), Told(3, "b", FACTS | changed)]
    with pytest.raises(UserError) as refused:
        refuse_difference(told)
    assert sentence in str(refused.value)


def test_a_file_that_only_one_rank_has_imported_is_no_difference() -> None:
    refuse_difference([Told(0, "a", FACTS), Told(1, "a", FACTS | {"code": {"train.py": "aa"}})])


@dataclass
class Sample:
    image: torch.Tensor
    label: int


class Picture:
    """As PIL has it: not a sequence, without attributes of its own that would tell."""

    __slots__ = ("content", "mode", "size")

    def __init__(self, content: bytes) -> None:
        self.content, self.mode, self.size = content, "L", (2, 2)

    def tobytes(self) -> bytes:
        return self.content


def samples(shift: int) -> list[Any]:
    """One of every kind, all of them others for another `shift`."""
    numbers = torch.arange(4) + shift
    return [
        numbers,
        numbers.to(torch.bfloat16),
        torch.tensor(float(shift)),
        numbers.numpy(),
        np.array([{"a": shift}, None], dtype=object),
        np.float32(shift),
        shift,
        f"text {shift}",
        bytes([shift]),
        {"x": numbers, "y": [1, (2.0, None, f"{shift}")]},
        {1, 2, shift + 10},
        Sample(numbers, 3),
        Picture(bytes([0, 1, 2, shift])),
        SimpleNamespace(x=numbers),
        Path(f"/data/{shift}.jpg"),
    ]


def test_equal_samples_of_any_kind_have_one_digest_and_others_another() -> None:
    ours, same, others = ([digest_of_value(one) for one in samples(shift)] for shift in (1, 1, 2))
    assert ours == same
    assert all(one != other for one, other in zip(ours, others, strict=True))
    assert digest_of_value(torch.zeros(2, 3)) != digest_of_value(torch.zeros(3, 2))
    assert digest_of_value({"a": 1, "b": 2}) == digest_of_value({"b": 2, "a": 1})


def test_a_sample_that_holds_itself_has_a_digest() -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    assert digest_of_value(circle)
