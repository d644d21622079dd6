"""What needs a GPU: the naive baseline on cuda:0 + cpu, and waiting that is measured by events of the GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.baselines import Busy, main, place_in_halves
from tests.cli.commands import SMALL_LM
from tests.dist.test_stragglers import LATE, of_kind, train
from tests.events import Event
from tests.parity.problems import VOCABULARY, RaggedTexts, TinyGPT
from tests.ranks import Job, RankPool

pytestmark = pytest.mark.gpu

DEVICES = (torch.device("cuda", 0), torch.device("cpu"))


def test_halves_on_two_devices_have_the_gradients_of_one_and_both_are_busy() -> None:
    tokens = torch.stack([RaggedTexts()[number]["x"] for number in range(4)])
    torch.manual_seed(0)
    whole = TinyGPT(depth=4)
    halves = TinyGPT(depth=4)
    halves.load_state_dict(whole.state_dict())
    busy = Busy(DEVICES)
    place_in_halves(halves, DEVICES, busy)
    assert {parameter.device.type for parameter in halves.parameters()} == {"cuda", "cpu"}
    for model, device in ((whole, "cpu"), (halves, "cuda")):
        busy.turn_to(DEVICES[0])
        logits = model(tokens.to(device))
        assert logits.device.type == device
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten().to(device) % VOCABULARY).backward()  # type: ignore[no-untyped-call]
    busy.turn_to(None)
    for (name, ours), theirs in zip(halves.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert min(busy.seconds.values()) > 0


def test_the_benchmark_shows_why_nobody_should_place_layers_by_hand(tmp_path: Path) -> None:
    options = ["--steps", "8", "--repeats", "1", "--json", str(tmp_path / "figures.json"), *SMALL_LM]
    assert main(["naive-mp", *options]) == 0
    single, naive = json.loads((tmp_path / "figures.json").read_text())
    assert single["speed_up"] == 1
    assert naive["same_loss"] is True
    assert naive["idle"].keys() == {"cuda:0", "cpu"}
    assert sum(naive["idle"].values()) > 0.9, "one works while the other waits"


def slow_on_a_shared_gpu(job: Job, layout: str) -> list[Event]:
    return train(job, layout, "compute", device="cuda", share_gpu=True)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2"])
def test_a_slow_rank_is_named_where_the_gpu_measures_the_waiting(ranks: RankPool, layout: str) -> None:
    events = ranks.run(slow_on_a_shared_gpu, 2, layout, timeout=100)[0]
    for event in of_kind("ranks", events):
        assert event["compute"][1] > 0.8 * LATE
        assert event["wait"][0] > 0.5 * LATE
    (straggler,) = of_kind("straggler", events)
    assert (straggler["rank"], straggler["cause"]) == (1, "compute")


def test_waiting_is_read_from_the_gpu_and_only_what_it_stood_still() -> None:
    """The host sleeps while the GPU still works: nobody waited."""
    from lockstep.observe.clock import StepClock

    clock = StepClock(torch.device("cuda"))
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    waited = []
    for busy in (True, False):
        clock.start()
        if busy:
            for _ in range(40):
                matrix = (matrix @ matrix).clamp(-1, 1)
        with clock.stalled("wait"):
            time.sleep(0.05)
        clock.step_done(samples=1)
        waited.append(clock.take(last=True).wait)
    assert waited[0] < 0.5 * waited[1]
    assert waited[1] >= 0.05


def test_a_collective_that_nccl_puts_on_the_computing_stream_is_waiting_too(tmp_path: Path) -> None:
    from lockstep.observe.clock import StepClock

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    clock = StepClock(torch.device("cuda"))
    clock.listen()
    try:
        clock.start()
        for _ in range(20):
            dist.all_reduce(torch.ones(1_000_000, device="cuda"))
        clock.step_done(samples=1)
        assert clock.take(last=True).wait > 0
    finally:
        clock.restore()
        dist.destroy_process_group()
