"""The trace cuts the real model for a world that is not there, and counts what rank 0 holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.stacks import find_stack
from lockstep.errors import UserError
from lockstep.follow.forward import following
from lockstep.layout import Layout
from lockstep.links.collective_cost import Link
from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.model.parts import Shape
from lockstep.planner.model.transformer import transformer
from lockstep.planner.trace.count import Collectives, Traced, cross_check, cross_check_text, trace_memory
from lockstep.planner.trace.dry_run import TracedTraining
from lockstep.planner.trace.storages import Storages
from lockstep.planner.trace.torch_model import Transformer

HIDDEN, VOCABULARY, TOKENS, LAYERS = 1024, 2048, 64, 2
SHAPE = Shape(LAYERS, HIDDEN, 8, 4096, VOCABULARY, gated=True, tied=False, biases=False, norm="rms")
GPU = GpuKind("some", {"bf16": 1.0, "fp32": 1.0}, 1.0, 80.0, 1000.0, 100, 100.0, 10.0, "a test", is_cpu=True)
BLOCK = 4 * HIDDEN**2 + 3 * 4096 * HIDDEN + 2 * HIDDEN
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN


def job(layout: str, **changes: object) -> Job:
    cut = Layout.parse(layout)
    machine = Machine("some", GPU, 8, -(-cut.world_size // 8), Link(0.0, 0.0), Link(0.0, 0.0))
    given = {"global_batch": cut.data_size, "micro_batch": 1, "precision": "fp32", **changes}
    return Job(transformer("test", SHAPE, TOKENS), machine, cut, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        Shape(3, 32, 4, 64, 100, positions=TOKENS),
        Shape(2, 32, 4, 48, 100, kv_heads=2, head_dim=16, gated=True, norm="rms", dropout=True),
    ],
)
def test_the_module_has_the_parameters_of_the_shape(shape: Shape) -> None:
    with torch.device("meta"):
        module = Transformer(shape, TOKENS)
    assert sum(parameter.numel() for parameter in module.parameters()) == transformer("", shape, TOKENS).parameters


def test_1024_ranks_hold_a_1024th_each_and_gather_a_block_at_a_time() -> None:
    traced = trace_memory(job("fsdp=1024"))
    # Every matrix has as many rows as there are ranks, or a multiple; a norm has a number for each rank.
    assert traced.parameters == 4 * (LAYERS * BLOCK + ENDS) // 1024
    steps = 4 * (LAYERS * 9 + 3)  # torch keeps the number of steps for each of the parameters
    assert traced.optimizer == 2 * traced.parameters + steps
    assert traced.buffers == 4 * 2 * TOKENS * HIDDEN // 8  # the table of rotary positions
    # Forward and backward gather each block, and the ends stay from the first to the last.
    whole = 4 * (2 * LAYERS * BLOCK + ENDS)
    by_kind = {(one.kind, one.axis): one for one in traced.collectives}
    assert by_kind["allgather_base", "fsdp"] == Collectives("allgather_base", "fsdp", 2 * LAYERS + 1, whole)
    summed = Collectives("reduce_scatter_base", "fsdp", LAYERS + 1, 4 * (LAYERS * BLOCK + ENDS))
    assert by_kind["reduce_scatter_base", "fsdp"] == summed
    # The ends and a block are whole in any backward, and what they were gathered through comes on top.
    assert 4 * (ENDS + BLOCK) < traced.communication < 4 * (ENDS + 3 * BLOCK)
    assert traced.process_bytes < 1e9


def test_tensor_parallelism_halves_matrices_and_leaves_norms_whole() -> None:
    traced = trace_memory(job("fsdp=4,tp=2", recompute="full"))
    matrices = LAYERS * (BLOCK - 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN
    norms = (2 * LAYERS + 1) * HIDDEN
    assert traced.parameters == 4 * (matrices // 2 + norms) // 4
    axes = {one.axis for one in traced.collectives}
    assert axes == {"fsdp", "tp"}


def test_replicas_hold_all_and_their_gradients_in_buckets() -> None:
    traced = trace_memory(job("dp=4"))
    everything = LAYERS * BLOCK + ENDS
    assert traced.parameters == 4 * everything
    buckets = traced.gradients // 4 - everything
    assert 0 < buckets < 20  # one number more in each


def test_recompute_keeps_less_and_accumulation_holds_whole_gradients() -> None:
    many = {"global_batch": 64, "micro_batch": 64}
    plain, recomputed = (trace_memory(job("single", recompute=how, **many)) for how in ("none", "full"))
    # A block keeps what its two norms read and wrote, queries, keys, values and their mix, and the MLP's four.
    kept = 4 * 64 * TOKENS * (8 * HIDDEN + 4 * 4096)
    assert plain.activations - recomputed.activations == pytest.approx((LAYERS - 1) * kept, rel=0.2)
    accumulated = trace_memory(job("fsdp=4", global_batch=8))
    assert accumulated.micro_batches == 2
    # At the fullest moment the second backward has summed up some of them: before, each rank had all.
    assert accumulated.gradients > 4 * (LAYERS * BLOCK + ENDS) / 2


def test_any_module_can_be_traced_and_its_activations_are_what_autograd_keeps() -> None:
    width, samples = 256, 8

    def build() -> TracedTraining:
        def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
            return model(batch).sum(), 1

        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh(), nn.Linear(width, width, bias=False))
        return TracedTraining(lambda: model, loss, lambda count: torch.zeros(count, width))

    traced = trace_memory(replace(job("single"), micro_batch=samples), build)
    assert traced.parameters == 4 * 2 * width**2
    # The fullest moment is when the second weight has its gradient and the first one's is made: the result of tanh is
    # gone by then, and what is left is the gradient of its argument, and a few single numbers.
    assert traced.gradients == 4 * width**2
    assert 4 * width**2 <= traced.activations < 4 * width**2 + 3 * 4 * samples * width


def test_a_storage_counts_once_until_its_last_tensor_is_gone() -> None:
    watch = Storages({})
    with following(operation=watch.note):
        watch.heading = "activations"
        base = torch.empty(100)
        view = base.view(10, 10)
        del base
        assert watch.now["activations"] == 400
        watch.see(view, "gradients")
        assert (watch.now["activations"], watch.now["gradients"]) == (0, 400)
        del view
        other = torch.empty(10)
    assert watch.now["gradients"] == 0
    assert watch.now["activations"] == other.nbytes
    assert watch.peak["activations"] == 400


@pytest.mark.parametrize(
    ("layout", "changes", "named"),
    [
        ("pp=2", {}, "pp=2"),
        ("cp=2", {}, "cp=2"),
        ("single", {"recompute": "selective"}, "selective"),
        ("single", {"precision": "fp8"}, "fp8"),
        ("single", {"compiled": True}, "compiled"),
        ("single", {"stack": find_stack("megatron")}, "megatron"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(layout: str, changes: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named) as refused:
        trace_memory(job(layout, **changes))
    assert "dp, fsdp and tp" in refused.value.fix


def test_an_rms_norm_keeps_on_a_gpu_what_its_kernel_keeps() -> None:
    many = job("single", global_batch=64, micro_batch=64)
    of_a_gpu = replace(many.machine, gpu=replace(GPU, is_cpu=False))
    stepwise, fused = trace_memory(many), trace_memory(replace(many, machine=of_a_gpu))
    # On a CPU it keeps what it divided, too, before the weight is multiplied with it.
    saved = (2 * LAYERS + 1) * 4 * 64 * TOKENS * HIDDEN
    assert stepwise.activations - fused.activations == pytest.approx(saved, rel=0.3)


def test_what_the_cut_refuses_is_refused_by_the_trace() -> None:
    with pytest.raises(UserError, match="tp"):
        trace_memory(job("tp=7"))


def test_formulas_stand_beside_the_trace_term_by_term() -> None:
    traced = Traced(90, 0, 200, 1000, 100, 10, "backward", 0, 0, (), 1, 1.0, 1)
    memory = Memory(0, 110, 20, 200, 800, 100, 100, 50, band=0.1)
    found = {one.term: one for one in cross_check(traced, [memory])}
    assert (found["parameters"].formula, found["parameters"].traced) == (110, 100)
    assert found["parameters"].share == pytest.approx(0.1)
    assert found["gradients"].share is None
    assert found["activations"].share == pytest.approx(-0.1)
    assert (found["total"].formula, found["total"].traced) == (1330, 1400)
    assert "-10.0 %" in cross_check_text(list(found.values()))


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("llama-3.2-1b", "tp=2,fsdp=4", {}),
        ("llama-3.2-1b", "tp=2,fsdp=4", {"recompute": "full"}),
        ("gpt2", "tp=2,fsdp=4", {}),
        ("gpt2", "fsdp=4", {}),
    ],
)
def test_formulas_hold_what_the_real_model_holds(name: str, layout: str, changes: dict[str, object]) -> None:
    """Two blocks of it, in bf16 as on a GPU: the loss over a cut vocabulary, gathered inputs, dropout of attention."""
    cut = Layout.parse(layout)
    model = find_model(name, 1024, {"layers": 2})
    planned = Job(model, find_machine("H100", gpus=cut.world_size), cut, 4 * cut.data_size, 4, **changes)  # type: ignore[arg-type]
    differences = {one.term: one.share for one in cross_check(trace_memory(planned), estimate_memory(planned))}
    assert differences["activations"] == pytest.approx(0.0, abs=0.05)
    # With tp a rank has the gradients of the step before, of which there is none in a trace.
    assert differences["total"] == pytest.approx(0.0, abs=0.05 if cut.tp == 1 else 0.08)
