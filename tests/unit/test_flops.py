"""FLOPs are those of the whole model on one device, forward and backward, checked here by hand for each kind of model.

A product of an m x k with a k x n matrix is 2 m k n: a multiplication and an addition for each term of each sum. Its
backward is two such products, the gradient of the weights and that of the input; the latter is left out for the first
layer, whose input are data that nobody derives by.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives  # private in torch 2.11 and 2.13
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lockstep.config.catalog import Cifar10Settings, LmSettings
from lockstep.data.loader import MicroBatch
from lockstep.links.measured import Bench, Speed
from lockstep.observe import device_peak as peak
from lockstep.observe import flops
from lockstep.observe.device_peak import find_peak
from lockstep.observe.flops import UncutModel, count_flops, model_without_data
from lockstep.recipes import lm, resnet, vision
from lockstep.runtime.rank_env import Place

CPU = torch.device("cpu")
ALONE = Place(0, 1, 0, 1, 0, 1, None, "python")


def counted(model: nn.Module, loss: Callable[..., Any], data: Any) -> dict[str, int]:
    return count_flops(model_without_data(model), loss, data)


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


# ---- Three models by hand


def test_a_perceptron_of_two_layers_costs_three_products_a_layer_less_the_gradient_of_the_data() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 10))
    first, second = 2 * 4 * 20 * 30, 2 * 4 * 30 * 10
    assert counted(model, squares, torch.zeros(4, 20)) == {
        "products": (first + second)  # forward
        + (first + second)  # gradients of both weights
        + second  # gradient of the hidden layer; that of the data is not computed
    }


def test_a_gpt_costs_six_flops_a_weight_and_token_and_twelve_for_every_pair_of_tokens_and_channel() -> None:
    batch, length, width, layers = 3, 32, 16, 2
    settings = LmSettings(context=length, width=width, layers=layers, heads=2)
    words = torch.zeros(batch, length, dtype=torch.long)
    tokens = batch * length
    # Weights that multiply something; the tables of tokens and positions are looked up, which costs nothing.
    block = width * 3 * width + width * width + width * 4 * width + 4 * width * width
    head = width * lm.VOCABULARY
    # Every input here depends on a weight (of the embedding at first), so nothing is left out of the backward.
    products = 6 * tokens * (layers * block + head)
    # Queries by keys and weights by values: 2 x 2 length^2 width forward, and twice that backward.
    attention = 12 * batch * layers * width * length**2
    found = counted(lm.GPT(settings), lm.loss, {"x": words, "y": words})
    assert found == {"products": products, "attention": attention}


def test_a_resnet_costs_what_its_convolutions_do_one_by_one() -> None:
    def convolution(channels_in: int, channels: int, kernel: int, side: int) -> int:
        return 2 * channels * side**2 * channels_in * kernel**2

    width, images = 4, 2
    stem = convolution(3, width, 3, 32)
    # Each: channels in and out, and the side of the image after it. The stride is in the first convolution of a block.
    blocks = [(4, 4, 32), (4, 4, 32), (4, 8, 16), (8, 8, 16), (8, 16, 8), (16, 16, 8), (16, 32, 4), (32, 32, 4)]
    inner = sum(convolution(a, b, 3, side) + convolution(b, b, 3, side) for a, b, side in blocks)
    around = sum(convolution(a, b, 1, side) for a, b, side in blocks if a != b)
    head = 2 * 32 * 10
    found = counted(
        resnet.ResNet18(Cifar10Settings(width=width)),
        vision.loss,
        {"x": torch.zeros(images, 3, 32, 32), "y": torch.zeros(images, dtype=torch.long)},
    )
    # Nobody derives by the pixels: the stem has no gradient of its input.
    assert found == {"convolutions": images * (2 * stem + 3 * (inner + around)), "products": images * 3 * head}


# ---- Each operation


@pytest.mark.parametrize(
    ("layer", "forward"),
    [
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * 8 * 16 * 9),
        (nn.Conv1d(8, 4, 1, groups=2), 2 * 4 * 4 * 4),
        (nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2), 2 * 8 * 16 * 2 * 4),
    ],
)
def test_grouped_and_transposed_convolutions_cost_their_own_channels_alone(layer: nn.Module, forward: int) -> None:
    data = torch.zeros(1, 8, 4) if isinstance(layer, nn.Conv1d) else torch.zeros(1, 8, 4, 4)
    assert counted(layer, squares, data) == {"convolutions": 2 * forward}, "forward, and the gradient of the weights"


class Attention(nn.Module):
    """Attention of 5 queries over 7 keys in 2 heads, called in one way or another."""

    def __init__(self, attend: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.attend, self.options = attend, options
        self.weights = nn.Parameter(torch.zeros(2, 19, 8))

    def forward(self, _: Tensor) -> Tensor:
        query, key, value = torch.split(self.weights[None], [5, 7, 7], dim=2)
        return self.attend(query, key, value, **self.options)


BY_HAND = 2 * 2 * 2 * 5 * 7 * 8
BOUND_EARLY = F.scaled_dot_product_attention


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}, {"attn_mask": torch.ones(5, 7) > 0}])
def test_attention_counts_whole_and_the_same_whatever_it_hides_or_drops(options: dict[str, Any]) -> None:
    found = counted(Attention(lambda *q, **o: F.scaled_dot_product_attention(*q, **o), **options), squares, CPU_BATCH)
    assert found == {"attention": 3 * BY_HAND}


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_a_kernel_that_was_bound_early_counts_as_much(kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):
        found = counted(Attention(BOUND_EARLY), squares, CPU_BATCH)
    assert found == {"attention" if kernel == SDPBackend.FLASH_ATTENTION else "products": 3 * BY_HAND}


CPU_BATCH = torch.zeros(1, 1)


def test_queries_that_share_keys_cost_by_queries() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Parameter(torch.zeros(1, 4, 5, 8)), nn.Parameter(torch.zeros(1, 2, 5, 8))

        def forward(self, _: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.query, self.key, self.key.detach(), enable_gqa=True)

    product = 2 * 4 * 5 * 5 * 8
    # Two forward; backward that of the weights, of queries and of keys, and none of values, which are constant.
    assert counted(Grouped(), squares, CPU_BATCH) == {"attention": 5 * product}


def test_the_attention_of_torchs_own_layer_is_counted_as_such() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    tokens, pairs = 2 * 5, 2 * 5 * 5
    weights = 4 * 16 * 16 + 2 * 16 * 32
    found = counted(model, squares, torch.zeros(2, 5, 16))
    data_gradient = 2 * tokens * 16 * 3 * 16  # of what queries, keys and values are made of
    assert found == {"products": 6 * tokens * weights - data_gradient, "attention": 12 * pairs * 16}


def test_a_recurrent_layer_is_products_though_libraries_have_it_as_one_kernel() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 16, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            out: Tensor = self.layer(given)[0]
            return out

    batch, steps, gates = 2, 5, 4 * 16
    given, recurrent = 2 * batch * steps * 8 * gates, 2 * batch * steps * 16 * gates
    first_state = recurrent // steps  # zeros, by which nobody derives
    assert counted(Recurrent(), squares, torch.zeros(batch, steps, 8)) == {
        "products": 2 * given + 3 * recurrent - first_state
    }


def test_frozen_layers_cost_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    product = 2 * 8 * 8
    assert counted(model, squares, torch.zeros(1, 8)) == {"products": 3 * product}, "two forward, one gradient"


# ---- What must not change the number


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_twice_to_save_memory_counts_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, saves_memory: bool) -> None:
            super().__init__()
            self.saves_memory = saves_memory
            self.before, self.layer = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            x = self.before(given)
            out: Tensor = checkpoint(self.layer, x, use_reentrant=reentrant) if self.saves_memory else self.layer(x)
            return out

    data = torch.zeros(2, 5, 8)
    assert counted(Checkpointed(True), squares, data) == counted(Checkpointed(False), squares, data)


def test_tracing_draws_no_random_number_and_leaves_the_model_and_its_gradients_alone() -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        noise = torch.randn(3), np.random.rand(), random.random()
        return squares(model, batch)[0], float(noise[0].sum()) + noise[1] + noise[2]

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    counted(model, loss, torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_of_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 16, 1 << 16, bias=False) for _ in range(4)))  # 64 GiB
    assert counted(model, squares, torch.zeros(1, 1 << 16)) == {"products": (3 * 4 - 1) * 2 * 2**32}


# ---- What cannot be traced


def event_of(model: nn.Module, loss: Callable[..., Any], data: Any = CPU_BATCH) -> tuple[Mapping[str, float], str]:
    uncut = UncutModel()
    assert uncut.watching(lambda: model)() is model
    uncut.show(loss, MicroBatch(0, [0], data))
    return uncut.per_sample, uncut.reason


def test_it_is_counted_once_whether_the_model_or_the_samples_come_first() -> None:
    """With pipelines the model is built when the first samples are known, else before them."""
    uncut, first = UncutModel(), MicroBatch(0, [7, 9], torch.ones(2, 3))
    uncut.show(squares, first)
    assert uncut.reason == "the model was not built"
    build = uncut.watching(lambda: nn.Linear(3, 5))
    build()
    assert (uncut.per_sample, uncut.reason) == ({"products": 2 * 2 * 3 * 5}, "")
    with mock.patch("lockstep.observe.flops.in_a_child") as again:
        build()
        uncut.show(squares, first)
    again.assert_not_called()


def test_a_loss_that_reads_values_of_the_batch_is_traced() -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        return (model(batch) if batch.sum().item() > 0 else model(batch) * 0).sum(), batch.sum().item()

    assert event_of(nn.Linear(3, 5), loss, torch.ones(1, 3)) == ({"products": 2 * 2 * 3 * 5}, "")


def test_a_loss_that_reads_values_of_the_model_has_a_reason_instead() -> None:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        out = model(batch)
        return (out if out.sum() > 0 else -out).sum(), 1

    by, reason = event_of(nn.Linear(1, 1), loss)
    assert by == {}
    assert "test_flops.py" in reason
    assert "reads a value of the model" in reason


def test_whatever_the_users_code_raises_is_the_reason() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, _: Any) -> Any:
            raise TypeError("not to be copied")

    def broken(*_: Any) -> tuple[Tensor, int]:
        raise ZeroDivisionError("oh")

    assert event_of(nn.Linear(1, 1), broken) == ({}, "the model cannot be traced: ZeroDivisionError: oh")
    assert "not to be copied" in event_of(Stubborn(1, 1), squares)[1]
    assert event_of(nn.Linear(1, 1), lambda _, __: 5)[1].startswith("the model cannot be traced: TypeError")


def test_a_loss_that_talks_to_other_ranks_is_refused_rather_than_waited_for(tmp_path: Path) -> None:
    def talking(talk: Callable[[Tensor], Any]) -> Callable[..., Any]:
        return lambda model, batch: (talk(torch.ones(1)), (model(batch).sum(), 1))[1]

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for talk in (
            dist.all_reduce,
            lambda tensor: dist.broadcast(tensor, 0),
            lambda _: dist.barrier(),
            lambda _: dist.all_gather_object([None], "me"),
            lambda tensor: functional_collectives.all_reduce(tensor, "sum", [0]),
        ):
            assert "it talks to other ranks" in event_of(nn.Linear(1, 1), talking(talk))[1]
    finally:
        dist.destroy_process_group()


def test_a_trace_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "LONGEST_SECONDS", 0.2)
    assert "takes longer than 0.2 s" in event_of(nn.Linear(1, 1), lambda *_: time.sleep(100_000))[1]


def test_a_process_that_dies_while_it_traces_is_the_reason() -> None:
    assert "has died" in event_of(nn.Linear(1, 1), lambda *_: os.kill(os.getpid(), signal.SIGKILL))[1]


def test_a_machine_without_room_for_another_process_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    assert "Cannot allocate memory" in event_of(nn.Linear(3, 5), squares, torch.ones(1, 3))[1]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_with_more_files_than_select_knows_traces_too() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert event_of(nn.Linear(3, 5), squares, torch.ones(1, 3))[1] == ""
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_loss_that_changes_its_batch_or_itself_finds_both_as_they_were() -> None:
    """It is called once more than the run asks for, in a process of its own."""
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        target = batch.pop("y")
        batch["x"].mul_(2)
        seen.append(model(batch["x"]))
        print("printed once")
        return (seen[-1] - target).square().sum(), 4

    batch = {"x": torch.ones(4, 3), "y": torch.ones(4, 2)}
    by, reason = event_of(nn.Linear(3, 2), loss, batch)
    assert (by, reason) == ({"products": 4 * 2 * 3 * 2 * 2}, ""), "forward, and the gradient of the weights"
    assert seen == []
    assert batch.keys() == {"x", "y"}
    assert batch["x"].equal(torch.ones(4, 3))


def test_large_tensors_that_a_model_hides_are_not_copied() -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)
            self.teacher = [nn.Linear(1024, 1024)]
            self.table = {"small": torch.ones(3), "large": torch.ones(1 << 19)}

    copy: Any = model_without_data(Student())
    assert [type(one).__name__ for one in (copy.teacher[0].weight.data, copy.table["large"])] == ["FakeTensor"] * 2
    assert copy.table["small"].equal(torch.ones(3)), "a small one may be read"


# ---- The peak


@pytest.mark.parametrize(("kind", "tflops"), [("bf16", 989), ("tf32", 495), ("fp32", 67)])
def test_the_peak_of_a_gpu_is_that_of_dense_products_in_the_format_they_are_computed_in(
    monkeypatch: pytest.MonkeyPatch, kind: str, tflops: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    found = find_peak(torch.device("cuda", 0), kind, ALONE, share_gpu=False)
    assert found.flops == tflops * 1e12  # stas00/ml-engineering, compute/accelerator: 989 of bf16 without sparsity
    assert found.source == f"NVIDIA H200: dense {kind} products, by its data sheet, from the planner's catalogue"
    assert found.reason == ""


def test_ranks_that_share_a_gpu_have_a_share_of_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = replace(ALONE, world_size=4, local_world_size=4, head="a:1")
    assert find_peak(torch.device("cuda", 0), "bf16", place, share_gpu=True).flops == 989e12 / 2
    assert find_peak(torch.device("cuda", 0), "bf16", place, share_gpu=False).flops == 989e12


def bench_of(device: str, kind: Any, host: str, **tflops: float) -> Bench:
    speeds = [Speed(rank=rank, device=device, matmul_tflops=tflops, copy_gb_s=9.0) for rank in range(2)]
    parts: dict[str, Any] = {"rows": [], "pairs": [], "fits": [], "findings": [], "speeds": speeds}
    where: dict[str, Any] = {"device": kind, "backend": "gloo", "hosts": [host] * 2, "nodes": [0, 0]}
    return Bench(lockstep="0", torch="0", when="2026-01-01", complete=True, layout="dp=2", **where, **parts)


def test_the_peak_of_a_cpu_is_what_bench_has_measured_shared_by_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    for module in ("lockstep.observe.device_peak", "lockstep.planner.machine.here"):
        monkeypatch.setattr(f"{module}.newest_bench", lambda: bench_of("CPU", "cpu", "here", fp32=0.5))
    place = replace(ALONE, world_size=4, local_world_size=4, head="a:1")
    found = find_peak(CPU, "fp32", place, share_gpu=False)
    assert found.flops == pytest.approx(0.25e12), "two ranks reached half a TFLOP/s each, four share that"
    assert "lockstep bench of 2026-01-01" in found.source
    assert "bf16 is not known" in find_peak(CPU, "bf16", place, share_gpu=False).reason
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert "lockstep bench --device cpu" in find_peak(CPU, "fp32", place, share_gpu=False).reason


def test_a_gpu_that_nobody_knows_has_what_bench_measured_or_a_reason_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Future")
    monkeypatch.setattr(peak, "newest_bench", lambda: bench_of("NVIDIA Future", "cuda", "here", bf16=3000.0))
    assert find_peak(torch.device("cuda", 0), "bf16", ALONE, share_gpu=False).flops == 3000e12
    assert "run lockstep bench" in find_peak(torch.device("cuda", 0), "fp16", ALONE, share_gpu=False).reason
