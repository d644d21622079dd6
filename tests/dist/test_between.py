"""What a script does with the model between steps: the same on every layout as in a plain loop of PyTorch's."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from lockstep.runtime.seeds import seed_host, seed_of
from tests.parity.problems import SEED, adamw, error_of, join, text_loss
from tests.parity.test_tensor import GPT, LENGTH, VOCABULARY, Texts
from tests.ranks import Job, RankPool

STEPS, BATCH = 3, 8
LAYOUTS = ["dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2"]
build = partial(GPT, dropout=0.0, fused=True)
average_of: Any = get_ema_multi_avg_fn(0.5)  # type: ignore[no-untyped-call]


class Script:
    """What the script does beside the training: it is the same code in the plain loop and on every layout."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())  # once, as many scripts do
        self.average = {name: one.detach().clone() for name, one in self.parameters.items()}
        self.teacher = AveragedModel(model, multi_avg_fn=average_of, use_buffers=True)
        self.norms: list[float] = []

    def after_step(self, step: int) -> None:
        with torch.no_grad():
            for name, one in self.parameters.items():
                self.average[name].mul_(0.5).add_(one, alpha=0.5)
        self.teacher.update_parameters(self.model)
        self.norms += [torch.cat([one.detach().flatten() for one in self.model.parameters()]).norm().item()]
        if step == 2:  # weights that are changed by hand, in the ways that people write
            with torch.no_grad():
                for one in self.parameters.values():
                    one.mul_(0.9)
                head: Any = self.model.get_submodule("head")
                head.weight[3:5] += 0.25
                head.weight.data[0].zero_()

    def found(self) -> dict[str, Any]:
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        teacher = {f"teacher.{name}": tensor for name, tensor in self.teacher.module.state_dict().items()}
        average = {f"average.{name}": tensor for name, tensor in self.average.items()}
        swapped = copy.deepcopy(self.model)
        swapped.load_state_dict(self.average, strict=False)
        text = sampled(self.model)
        self.model.load_state_dict(self.average, strict=False)
        return {
            "tensors": state | teacher | average,
            "norms": self.norms,
            "text": text,
            "text of the average": sampled(self.model),
            "text of a copy": sampled(swapped),
        }


@torch.no_grad()
def sampled(model: nn.Module) -> list[int]:
    """Some tokens after a prompt, drawn from the likeliest ones as nanoGPT does."""
    model.eval()
    text = torch.arange(LENGTH)[None] % VOCABULARY
    draw = torch.Generator().manual_seed(7)
    for _ in range(6):
        logits = model(text[:, -LENGTH:])[:, -1]
        likely, _ = logits.topk(5)
        logits[logits < likely[:, [-1]]] = -float("inf")
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=draw)], 1)
    model.train()
    return text[0, LENGTH:].tolist()


def plain_training() -> dict[str, Any]:
    seed_host(seed_of(SEED, "init"))
    model = build()
    optimizer = adamw(list(model.named_parameters()))
    data, script = Texts(), Script(model)
    for step in range(1, STEPS + 1):
        loss, weight = text_loss(model, default_collate([data[(step - 1) * BATCH + i] for i in range(BATCH)]))
        optimizer.zero_grad()
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        script.after_step(step)
    return script.found()


def train(job: Job, layouts: list[str]) -> dict[str, Any]:
    found = {}
    for number, layout in enumerate(layouts):
        with join(job, layout, meeting=f"m{number}") as run:
            engine = run.setup(build, text_loss, optimizer=adamw)
            loader = run.loader(Texts(), BATCH, micro_batch=2, steps=STEPS, shuffle=False, workers=0)
            script = Script(engine.model)
            for batch in loader:
                script.after_step(engine.step(batch).step)
            found[layout] = script.found()
    return found


def test_what_a_script_reads_and_changes_between_steps_is_that_of_a_plain_loop(ranks: RankPool) -> None:
    expected = plain_training()
    for everything in ranks.run(train, 2, LAYOUTS, timeout=120):
        for layout, found in everything.items():
            for name, tensor in expected["tensors"].items():
                assert torch.allclose(found["tensors"][name], tensor, rtol=2e-4, atol=2e-5), (layout, name)
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5), layout
            for text in ("text", "text of the average", "text of a copy"):
                assert found[text] == expected[text], (layout, text)


def read_alone(job: Job) -> list[str]:
    """What is said where a script reads the model on one rank alone, and where it asks for what cannot be."""
    run = join(job, "tp=2")
    engine = run.setup(build, text_loss, optimizer=adamw)
    loader = iter(run.loader(Texts(), BATCH, micro_batch=2, steps=2, shuffle=False, workers=0))
    engine.step(next(loader))
    head: Any = engine.model.get_submodule("blocks.0.mlp")
    said = [error_of(partial(copy.deepcopy, head))]
    batch = next(loader)
    if job.rank == 0:  # as under `if run.is_main`: the other one begins its next step
        said.append(error_of(engine.model.state_dict))
    engine.step(batch)
    for name, one in engine.model.named_parameters():
        gradient = one.grad
        assert gradient is not None, name
        assert gradient.shape == one.shape, name
    run.leave()
    return [f"{type(error).__name__}: {error}" for error in said]


def test_a_model_that_one_rank_reads_alone_is_refused_at_once(ranks: RankPool) -> None:
    copied, alone = ranks.run(read_alone, 2)[0]
    assert copied.startswith("UserError: a part of the model was to be copied")
    assert alone.startswith(
        "UserError: rank 0 reads the model's parameters after step 1, and rank 1 has gone on without"
    )


# ---- What the optimizer keeps


def restart_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    for one in model.parameters():
        if one in optimizer.state:
            optimizer.state[one]["exp_avg"].zero_()
            optimizer.state[one]["exp_avg_sq"].mul_(0.5)
    return [float(len(optimizer.state[one])) for one in model.parameters()]


def throw_away(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    first, second, third, *others = model.parameters()
    optimizer.state[first] = {}
    del optimizer.state[second]
    optimizer.state.pop(third)["exp_avg"].zero_()
    for one in others:
        optimizer.state[one].clear()
    return [float(one in optimizer.state) for one in model.parameters()]


def replace_by_whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """As a script does it that takes over the moments of another run."""
    norms = []
    for number, one in enumerate(model.parameters()):
        state = optimizer.state[one]
        norms += [state["exp_avg"].norm().item(), float(state["step"])]
        state["exp_avg"] = torch.full_like(one, 1e-3 * number)
        state["exp_avg_sq"] += 1e-4
        state["step"] += 3
        optimizer.state[one] = dict(state, exp_avg_sq=state["exp_avg_sq"] * 1.5)
    return norms


def load_it_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    saved = copy.deepcopy(optimizer.state_dict())
    for one in model.parameters():
        optimizer.state[one]["exp_avg"].zero_()
    optimizer.load_state_dict(saved)
    for one in model.parameters():
        optimizer.state[one]["exp_avg"].mul_(2)
    return [optimizer.state[one]["exp_avg"].abs().max().item() for one in model.parameters()]


def another_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    kept = {one: dict(optimizer.state[one]) for one in model.parameters()}
    optimizer.state = defaultdict(dict)
    for one, state in kept.items():
        optimizer.state[one] = {key: value * 2 for key, value in state.items()}
    return []


CHANGES = [restart_everything, throw_away, replace_by_whole_tensors, load_it_again, another_dict]
STATE_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    *((layout, {}) for layout in ("fsdp=2", "tp=2", "pp=2")),
    ("fsdp=2", {"shard": {"level": "zero1"}}),
]


def plain_training_with(change: Any) -> tuple[list[float], list[float]]:
    seed_host(seed_of(SEED, "init"))
    model = build()
    optimizer = adamw(list(model.named_parameters()))
    data, losses, found = Texts(), [], []
    for step in range(4):
        loss, weight = text_loss(model, default_collate([data[step * BATCH + i] for i in range(BATCH)]))
        optimizer.zero_grad()
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach() / weight))
        if step == 1:
            found = change(model, optimizer)
    return losses, found


def train_with_changes(job: Job, layout: str, options: dict[str, Any]) -> list[tuple[list[float], list[float]]]:
    everything = []
    for number, change in enumerate(CHANGES):
        with join(job, layout, meeting=f"s{number}") as run:
            engine = run.setup(build, text_loss, optimizer=adamw, **options)
            losses, found = [], []
            for batch in run.loader(Texts(), BATCH, micro_batch=2, steps=4, shuffle=False, workers=0):
                losses.append(engine.step(batch).loss)
                if len(losses) == 2:
                    found = change(engine.model, engine.optimizer)
            everything.append((losses, found))
    return everything


@pytest.mark.parametrize(
    ("layout", "options"), STATE_LAYOUTS, ids=[f"{layout}{'-zero1' if more else ''}" for layout, more in STATE_LAYOUTS]
)
def test_what_a_script_does_with_the_optimizers_state_is_done_as_in_a_plain_loop(
    ranks: RankPool, layout: str, options: dict[str, Any]
) -> None:
    expected = [plain_training_with(change) for change in CHANGES]
    untouched, _ = plain_training_with(lambda *_: [])
    for everything in ranks.run(train_with_changes, 2, layout, options, timeout=120):
        for change, (losses, found), (right, read) in zip(CHANGES, everything, expected, strict=True):
            assert abs(right[3] - untouched[3]) > 1e-4, change.__name__
            assert losses == pytest.approx(right, rel=1e-4), change.__name__
            assert found == pytest.approx(read, rel=1e-3, abs=1e-6), change.__name__
