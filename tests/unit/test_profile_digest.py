"""What a trace says, on made-up traces whose numbers are added up by hand (times in milliseconds)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lockstep.observe.intervals import common, length, outside, union
from lockstep.observe.kernel_names import short_kernel_name
from lockstep.observe.trace_digest import MOST_GAPS, MOST_KERNELS, digest_trace
from lockstep.observe.trace_memory import MOST_POINTS, thinned, users_function

MAIN, GLOO, STREAM, NCCL_STREAM = 1, 2, 7, 20


def span(
    name: str, begin: float, end: float, category: str = "cpu_op", thread: int = MAIN, **args: Any
) -> dict[str, Any]:
    at = {"ts": 5e9 + 1000 * begin, "dur": 1000 * (end - begin), "pid": 1, "tid": thread}
    return {"ph": "X", "cat": category, "name": name, "args": args, **at}


def step(begin: float, end: float, number: int = 10) -> dict[str, Any]:
    return span(f"ProfilerStep#{number}", begin, end, "user_annotation")


def block(at: float, size: int, address: int, total: int = 0, device: int = 0, thread: int = MAIN, **more: Any) -> Any:
    args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": device, "Device Id": device - 1}
    return {"ph": "i", "name": "[memory]", "ts": 5e9 + 1000 * at, "pid": 1, "tid": thread, "args": {**args, **more}}


def digest(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    shuffled = list(events)
    random.Random(0).shuffle(shuffled)  # a trace has no order
    return digest_trace({"traceEvents": shuffled, **more})


def milliseconds(found: dict[str, Any]) -> dict[str, Any]:
    return {part: pytest.approx(1000 * seconds) for part, seconds in found["seconds"].items()}


def test_intervals_are_joined_cut_and_turned_around():
    ours = union([(5, 7), (0, 2), (1, 3), (6, 6), (3, 4)])
    assert ours == [(0, 4), (5, 7)]
    assert common(ours, [(1, 2), (3.5, 6)]) == [(1, 2), (3.5, 4), (5, 6)]
    assert outside(ours, (-1, 8)) == [(-1, 0), (4, 5), (7, 8)]
    assert outside(ours, (1, 6)) == [(4, 5)]
    assert outside([], (0, 1)) == [(0, 1)]
    assert length(ours) == 6


def test_kernels_of_all_streams_are_laid_over_each_other():
    """Compute 0-40 and 50-60, NCCL 30-55 and 70-80, of 100: both 30-40 and 50-55, neither 60-70 and 80-100."""
    found = digest(
        step(0, 100),
        span("gemm", 0, 30, "kernel", STREAM),
        span("gemm", 20, 40, "kernel", STREAM + 1),
        span("add", 50, 58, "kernel", STREAM),
        span("Memcpy HtoD", 58, 60, "gpu_memcpy", STREAM),
        span("ncclDevKernel_AllReduce_Sum_f32", 30, 55, "kernel", NCCL_STREAM),
        span("ncclDevKernel_AllReduce_Sum_f32", 70, 80, "kernel", NCCL_STREAM),
        span("aten::mm", 0, 99),
        span("gloo:all_reduce", 0, 99, "user_annotation", GLOO),
        span("forward", 0, 99, "gpu_user_annotation", STREAM),
    )
    expected = {"whole": 100, "compute": 50, "communication": 35, "overlapped": 15, "idle": 30}
    assert milliseconds(found) == expected
    assert [name for name, *_ in found["kernels"]] == ["gemm", "ncclDevKernel_AllReduce_Sum_f32", "add", "Memcpy HtoD"]
    assert found["kernels"][0][1:] == [2, pytest.approx(0.05)]
    nccl = "ncclDevKernel_AllReduce_Sum_f32"
    assert found["gaps"] == [
        [pytest.approx(0.08), pytest.approx(0.02), nccl, "the end"],
        [pytest.approx(0.06), pytest.approx(0.01), "Memcpy HtoD", nccl],
    ]
    assert found["text"] == (
        "rank 0 computed 50 % of the time, communicated 35 %, 43 % of that hidden behind compute, and was idle 30 %: "
        f"the longest gap, 20 ms, was after {nccl}"
    )


def test_a_gpu_that_still_computes_when_the_host_is_done_is_part_of_the_steps():
    found = digest(step(0, 10), step(10, 20, 11), span("gemm", 5, 50, "kernel", STREAM))
    assert milliseconds(found) == {"whole": 50, "compute": 45, "communication": 0, "overlapped": 0, "idle": 5}
    assert found["text"] == (
        "rank 0 computed 90 % of the time, and was idle 10 %: the longest gap, 5 ms, was before gemm"
    )


def test_operators_of_a_cpu_count_once_and_collectives_from_call_to_end():
    """Compute 0-30, 50-60 and 65-70 (the hook at 60-65 only waits); gloo 20-55; both 20-30 and 50-55."""
    around = "autograd::engine::evaluate_function: AddmmBackward0"
    found = digest(
        step(0, 80),
        span("aten::linear", 0, 30),
        span("aten::addmm", 5, 25),
        span("aten::copy_", 10, 15),
        span("c10d::allreduce_", 30, 32),
        span("gloo:all_reduce", 20, 55, "user_annotation", GLOO),
        span("aten::copy_", 22, 24, thread=GLOO),
        span(around, 50, 70),
        span("AddmmBackward0", 50, 60),
        span("aten::mm", 65, 70),
        span("forward", 0, 80, "user_annotation"),
        span("model.py(3): forward", 0, 80, "python_function"),
        lockstep={"rank": 3},
    )
    expected = {"whole": 80, "compute": 45, "communication": 35, "overlapped": 15, "idle": 15}
    assert milliseconds(found) == expected
    assert {name: (calls, round(1000 * seconds)) for name, calls, seconds in found["kernels"]} == {
        "gloo:all_reduce": (1, 33),
        "aten::addmm": (1, 15),
        "aten::linear": (1, 10),
        "AddmmBackward0": (1, 10),
        "aten::copy_": (2, 7),
        "aten::mm": (1, 5),
        "c10d::allreduce_": (1, 2),
    }
    assert found["gaps"][:2] == [
        [pytest.approx(0.07), pytest.approx(0.01), "aten::mm", "the end"],
        [pytest.approx(0.06), pytest.approx(0.005), "AddmmBackward0", "aten::mm"],
    ]
    assert found["text"].startswith("rank 3 computed 56 % of the time, communicated 44 %, 43 % of that hidden")


def test_a_collective_inside_of_an_operator_is_no_compute():
    found = digest(step(0, 10), span("fsdp::forward", 0, 10), span("c10d::allgather_", 2, 6))
    assert milliseconds(found) == {"whole": 10, "compute": 6, "communication": 4, "overlapped": 0, "idle": 0}
    assert found["gaps"] == []


def test_a_message_that_was_only_posted_is_no_communication():
    found = digest(step(0, 10), span("gloo:recv", 0, 9, "user_annotation"), span("aten::mm", 6, 10))
    assert milliseconds(found) == {"whole": 10, "compute": 4, "communication": 0, "overlapped": 0, "idle": 6}
    assert found["gaps"] == [[0.0, pytest.approx(0.006), "the start", "aten::mm"]]


def test_the_longest_come_first_and_the_lists_end():
    kernels = [span(f"kernel{n}", 10 * n, 10 * n + n / 10, "kernel", STREAM) for n in range(1, 40)]
    found = digest(step(0, 400), *kernels, span("k" * 5000, 396, 399.99, "kernel", STREAM))
    assert len(found["kernels"]) == MOST_KERNELS
    assert found["kernels"][0][0] == "k" * 102 + "..."
    assert [name for name, *_ in found["kernels"][1:3]] == ["kernel39", "kernel38"]
    assert len(found["gaps"]) == MOST_GAPS
    assert found["gaps"][0][3] == "kernel1"
    took = [seconds for _, seconds, *_ in found["gaps"]]
    assert took == sorted(took, reverse=True)


def test_memory_of_a_cpu_is_what_was_held_before_and_what_came_and_went():
    """Held: 1000 bytes of weights. 600 + 300 come, the 300 go, 500 come, 600 go: the peak is 2100."""
    found = digest(
        step(0, 100),
        span("model.py(3): forward", 0, 100, "python_function"),
        span("torch/nn/modules/linear.py(130): forward", 5, 90, "python_function"),
        block(10, 600, 11, Shape="10x15 float32"),
        block(20, 300, 12),
        block(30, -300, 12),
        block(40, 500, 12, Shape="125 float32"),
        block(50, -600, 11),
        lockstep={"held": [[1, 1000, "250 float32", "weight up"], [11, 9999, "", "gradient of up, given back since"]]},
    )
    assert [size for _, size in found["memory"]] == [1000, 1600, 1900, 1600, 2100, 1500]
    assert [second for second, _ in found["memory"]] == pytest.approx([0, 0.01, 0.02, 0.03, 0.04, 0.05])
    assert found["tensors"] == [
        [1000, "250 float32", "weight up"],
        [600, "10x15 float32", "model.py:3 (forward)"],
        [500, "125 float32", "model.py:3 (forward)"],
    ]


def test_memory_of_a_gpu_is_what_its_allocator_says_and_the_hosts_does_not_count():
    found = digest(
        step(0, 100),
        span("gemm", 0, 100, "kernel", STREAM),
        span("aten::empty", 9, 11),
        *(block(at, 10**9, at) for at in range(20, 30)),
        block(10, 512, 11, total=70_512, device=1),
        block(30, -512, 11, total=70_000, device=1),
    )
    assert [size for _, size in found["memory"]] == [70_000, 70_512, 70_000]
    assert found["tensors"] == [[512, "", "aten::empty"]]


def test_a_tensor_of_the_backward_names_the_code_whose_backward_it_is():
    found = digest(
        step(0, 100),
        span("model.py(3): forward", 0, 20, "python_function"),
        span("aten::addmm", 5, 6),
        {"ph": "s", "cat": "fwdbwd", "id": 1, "tid": MAIN, "ts": 5e9 + 5500},
        {"ph": "f", "cat": "fwdbwd", "id": 1, "tid": GLOO, "ts": 5e9 + 50500},
        span("autograd::engine::evaluate_function: AddmmBackward0", 50, 60, thread=GLOO),
        span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 70, 80, thread=GLOO),
        block(55, 100, 1, thread=GLOO),
        block(75, 90, 2, thread=GLOO),
    )
    assert [where for *_, where in found["tensors"]] == ["backward of model.py:3 (forward)", "AccumulateGrad"]


def test_code_of_libraries_is_not_the_users():
    assert users_function("train.py(12): loss") == "train.py:12 (loss)"
    assert users_function("/home/me/project/model.py(3): forward") == "project/model.py:3 (forward)"
    assert users_function("lockstep/recipes/lm.py(61): forward") == "recipes/lm.py:61 (forward)"
    for name in (
        "torch/nn/modules/linear.py(130): forward",
        "lockstep/engine.py(470): forward_backward",
        "contextlib.py(132): __enter__",
        "/usr/lib/python3.11/threading.py(3): wait",
        "/home/me/.venv/lib/python3.11/site-packages/numpy/core.py(3): sum",
        "cab2tsdwmwz3eqmpiaqyhpet7dn2c33pk5kgi6sxokegis2nfsgn.py(3): call",
        "<built-in function linear>",
        "nn.Module: Linear_0",
    ):
        assert users_function(name) is None


def test_a_long_timeline_keeps_its_ends_and_its_extremes():
    points = [(float(at), 1000) for at in range(100_000)]
    points[54_321], points[77_777] = (54_321.0, 99_999), (77_777.0, 1)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {points[54_321], points[77_777]} <= set(kept)
    assert list(kept) == sorted(kept)
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_a_trace_with_nothing_in_it_is_refused():
    with pytest.raises(ValueError, match="neither steps nor operators nor kernels"):
        digest(span("model.py(3): forward", 0, 80, "python_function"))


# ---- Names of CUDA kernels, as a run on an H200 with torch 2.11 has them

AN_ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (AN_ADD, "vectorized_elementwise_kernel<CUDAFunctor_add<float>>"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
            "::{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*,"
            " 2ul>, 4, TrivialOffsetCalculator<1, unsigned int> >(int)",
            "unrolled_elementwise_kernel<direct_copy_kernel_cuda>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda"
            "(at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul> >(in",
            "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>",
        ),
        (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float, "
            "float const*, float const*, float const*, float*, float*, ",
            "vectorized_layer_norm_kernel<float>",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
            "TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float, 1, 1, 0> >(long)",
            "multi_tensor_apply_kernel<BinaryOpScalarFunctor<float>>",
        ),
        (
            "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, at::native::func_wrapper_t<"
            "c10::BFloat16, at::native::sum_functor<c10::BFloat16, float, c10::BFloat16> >, unsigned int, 4> >(int)",
            "reduce_kernel<ReduceOp<func_wrapper_t<sum_functor<BFloat16>>>>",
        ),
        (
            "void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar "
            "const&, c10::Scalar const&, c10::Scalar const&, at::Tenso",
            "elementwise_kernel_with_index<arange_cuda_out>",
        ),
        ("nvjet_sm90_tst_64x48_64x15_2x4_h_bz_NNT", "nvjet_sm90_tst_64x48_64x15_2x4_h_bz_NNT"),
        ("ncclKernel_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_RING_LL"),
        ("", ""), ("::", "::"), ("<", "<"), ("f<", "f"), ("void f<(", "f"), ("g>>)", "g>>)"),
    ],
)  # fmt: skip
def test_a_kernel_is_called_by_what_it_computes(name: str, short: str):
    assert short_kernel_name(name) == short


def test_kernels_that_share_a_short_name_are_added_up_and_it_says_so():
    """8 and 4 wide adds are 2 x 10 and 5 ms; the copy of the driver and operators keep their names."""
    wider = AN_ADD.replace("<4,", "<8,")
    found = digest(
        step(0, 60),
        span("aten::add", 0, 60),
        span(wider, 0, 10, "kernel", STREAM),
        span(wider, 10, 20, "kernel", STREAM),
        span(AN_ADD, 30, 35, "kernel", STREAM),
        span("Memcpy DtoH (Device -> Pinned)", 50, 51, "gpu_memcpy", STREAM),
    )
    add = "vectorized_elementwise_kernel<CUDAFunctor_add<float>>"
    assert found["kernels"] == [[f"{add} (2 kernels)", 3, 0.025], ["Memcpy DtoH (Device -> Pinned)", 1, 0.001]]
    assert found["gaps"][0] == [0.035, 0.015, add, "Memcpy DtoH (Device -> Pinned)"]
    assert found["text"].endswith("the longest gap, 15 ms, was before Memcpy DtoH (Device -> Pinned)")


def test_collectives_are_known_by_their_whole_name():
    kernel = "void ncclKernel::run<4>(int)"
    found = digest(step(0, 10), span(kernel, 0, 4, "kernel", NCCL_STREAM), span(AN_ADD, 4, 10, "kernel", STREAM))
    assert found["seconds"]["communication"] == pytest.approx(0.004)
    assert found["kernels"][1][0] == "run"
