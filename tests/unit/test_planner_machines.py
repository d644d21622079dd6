"""The planner's machines: names that people type, profiles of centres, and what bench measured here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.cluster import find_cluster
from lockstep.errors import UserError
from lockstep.links.collective_cost import predict
from lockstep.links.measured import Bench, Pair, Row, Speed, fits_of, timed_row, write_bench
from lockstep.planner.machine.find_machine import find_gpu, find_machine, known_gpus

PUBLISHED = {
    "A100-SXM-80": "A100-SXM-80",
    "A100-SXM (8/node)": "A100-SXM-80",
    "A100-SXM (DGX-A100, 2020)": "A100-SXM-40",
    "A100-40 (JURECA-DC/JUWELS Booster node, 4 per node)": "A100-SXM-40",
    "H100-SXM-96GB-HBM2e-500W": "H100-SXM-96-500W",
    "V100-SXM3-32 (DGX-2)": "V100-SXM3-32",
    "V100-SXM3-32 (DGX-2H)": "V100-SXM3-32-DGX-2H",
    "V100-SXM2-16": "V100-SXM2-16",
    "GB200-NVL72": "GB200-NVL72",
    "GB200 (NVL72)": "GB200-NVL72",
    "H800": "H800",
    "TPUv4": "TPUv4",
    "NVIDIA H200": "H200-SXM-141",
    "NVIDIA A100-SXM4-80GB": "A100-SXM-80",
}


@pytest.mark.parametrize(("name", "entry"), PUBLISHED.items())
def test_gpus_are_found_by_the_names_of_published_tables_and_of_drivers(name: str, entry: str) -> None:
    assert find_gpu(name).name == entry


@pytest.mark.parametrize(
    ("name", "gpu", "each", "nodes"),
    [
        ("a100-80", "A100-SXM-80", 8, 1),
        ("8xH100", "H100-SXM-80", 8, 1),
        ("H100x16", "H100-SXM-80", 8, 2),
        ("64xh100", "H100-SXM-80", 8, 8),
        ("4xh100", "H100-SXM-80", 4, 1),
        ("MI300Xx16", "MI300X-192", 8, 2),
        ("mi300x", "MI300X-192", 8, 1),
        ("72xGB200", "GB200-NVL72", 72, 1),
        ("128xGB200", "GB200-NVL72", 64, 2),
        ("laptop-cpu", "laptop-cpu", 1, 1),
    ],
)
def test_a_name_with_a_count_is_so_many_gpus(name: str, gpu: str, each: int, nodes: int) -> None:
    machine = find_machine(name)
    assert (machine.gpu.name, machine.gpus_per_node, machine.nodes) == (gpu, each, nodes)


def test_every_entry_has_numbers_that_can_be() -> None:
    for name in known_gpus():
        machine = find_machine(name)
        gpu = machine.gpu
        assert 0.4 < gpu.matmul <= 0.9, name
        # A process cannot have more than the binary gigabytes that marketing calls decimal ones.
        assert (0.8 if gpu.is_cpu else 0.9) < gpu.usable < 2**30 / 1e9, name
        assert gpu.tflops.get("bf16", gpu.tflops.get("fp16", 0)) > 0, name
        assert 0 < gpu.idle_watts < gpu.watts, name
        assert 0 < machine.inside.alpha < 1e-3, name
        assert machine.gpu.source, name


def test_the_sizes_of_a_machine_are_whole_nodes_or_equal_parts_of_them() -> None:
    assert find_machine("h100", nodes=4).gpus == 32
    assert find_machine("h100", gpus=2).gpus == 2
    parts = find_machine("h100", gpus=12)
    assert (parts.nodes, parts.gpus_per_node) == (2, 6)
    assert "6 of the 8 GPUs" in parts.warnings[0]
    # Two of eight cards have no GPU that uses them.
    assert parts.outside.beta == pytest.approx(find_machine("h100").outside.beta * 8 / 6)
    with pytest.raises(UserError, match="use 8 or 16 GPUs"):
        find_machine("h100", gpus=13)
    with pytest.raises(UserError, match="2 equal nodes of at most 8: use 16 GPUs"):
        find_machine("h100", nodes=2, gpus=24)
    with pytest.raises(UserError, match="say it once"):
        find_machine("8xh100", gpus=16)
    # The same by another way: from the whole node of the catalogue, however small a part of it there was.
    for count in (1, 8, 64):
        assert find_machine("h100", gpus=count).with_gpus(12) == parts
        assert find_machine("h100", gpus=count).with_gpus(16) == find_machine("h100", nodes=2)


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown cluster 'h10'.*did you mean 'H100-SXM-80'"):
        find_machine("h10")
    with pytest.raises(UserError, match="did you mean 'example-gpu'"):
        find_machine("exmple-gpu")
    with pytest.raises(UserError, match=r"choose one of V100-SXM2-32, .*laptop-cpu, .*here"):
        find_machine("something else")


def test_links_give_the_published_all_reduces_they_were_fitted_to() -> None:
    """nccl-tests of 8 A100 and 8 V100, VIA-Research/vTrain: microseconds of 16 MB, 256 MB and 1 GB."""
    for name, times in {"a100-80": (232.4, 2162.3, 8193.0), "v100-32": (273.8, 3527.4, 13969.0)}.items():
        link = find_machine(name).inside
        for size, published in zip((1 << 24, 1 << 28, 1 << 30), times, strict=True):
            predicted = predict("all-reduce", "ring", 8, size, link) * 1e6
            assert predicted == pytest.approx(published, rel=0.12), (name, size)


# ---- Profiles


def profile(folder: Path, text: str) -> str:
    path = folder / "ours.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_profile_is_a_machine(tmp_path: Path) -> None:
    text = '[node]\ncount = 3\ngpus = 4\ngpu = "A100-40"\ngpu_link = "nvlink"\ngpu_link_gb_s = 300\nnetwork_gb_s = 50\n'
    machine = find_machine(profile(tmp_path, text))
    assert (machine.name, machine.gpu.name, machine.gpus_per_node, machine.nodes) == ("ours", "A100-SXM-40", 4, 3)
    assert 1e-9 / machine.outside.beta == pytest.approx(50 * 0.93)
    assert 1e-9 / machine.inside.beta == pytest.approx(300 * 0.75)
    assert machine.warnings == ()
    assert find_machine(str(tmp_path / "ours.toml"), nodes=2).nodes == 2


def test_nodes_that_differ_count_as_the_smallest_with_a_warning(tmp_path: Path) -> None:
    text = (
        '[node]\ncount = 2\ngpus = 8\ngpu = "H100"\nnetwork_gb_s = 50\n'
        '[[nodes]]\ncount = 4\ngpus = 4\ngpu = "A100-80"\nnetwork_gb_s = 200\n'
    )
    machine = find_machine(profile(tmp_path, text))
    assert (machine.gpu.name, machine.gpus_per_node, machine.nodes) == ("A100-SXM-80", 4, 6)
    assert 1e-9 / machine.outside.beta == pytest.approx(50 * 0.93)
    assert "differ (2 x 8 H100, 4 x 4 A100-80)" in machine.warnings[0]
    assert find_cluster(str(tmp_path / "ours.toml")).node.gpus == 8  # what submit asks for


def test_memory_is_the_smallest_even_where_the_slowest_gpu_has_more(tmp_path: Path) -> None:
    kinds = [("[node]", "A100-40"), ("[[nodes]]", "V100-32")]
    text = "".join(f'{head}\ngpus = 8\ngpu = "{gpu}"\nnetwork_gb_s = 50\n' for head, gpu in kinds)
    assert find_machine(profile(tmp_path, text)).gpu.memory_gb == 32
    text = text.replace("A100-40", "H100").replace("V100-32", "MI250X")
    gpu = find_machine(profile(tmp_path, text)).gpu
    assert (gpu.name, gpu.memory_gb) == ("MI250X-128", 80)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ours does not say what its nodes are made of: describe one"),
        ("[node]\ngpus = 4\n", "does not say which GPUs"),
        ('[node]\ngpus = 4\ngpu = "A1000"\n', "unknown GPU 'A1000'.*did you mean"),
        ('[[nodes]]\ngpus = 4\ngpu = "H100"\n', r"there is no \[node\]"),
        ('[node]\ngpus = 4\ngpu = "H100"\ngpu_link = "pcie"\n', "set node.gpu_link_gb_s"),
        ("[node]\ngpus = 4\n[[nodes]]\ngpu_s = 4\n", "unknown key 'nodes.0.gpu_s'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_machine(profile(tmp_path, text))


# ---- Here


def measured(ranks: int, device: str, name: str, tflops: dict[str, float], nodes: list[int] | None = None) -> Bench:
    """All-reduces that take 2 (n - 1) x 10 us and 4 GB/s of bus bandwidth."""
    rows: list[Row] = []
    for size in (1 << 10, 1 << 16, 1 << 22, 1 << 26):
        seconds = 2 * (ranks - 1) * (10e-6 + size / ranks / 4e9)
        rows.append(timed_row("dp", ranks, "all-reduce", size, [seconds], 3))
    return Bench(
        lockstep="0",
        torch="2",
        when="2026-01-01T00:00:00+00:00",
        complete=True,
        layout=f"dp={ranks}",
        device="cpu" if device == "cpu" else "cuda",
        backend="gloo" if device == "cpu" else "nccl",
        hosts=["one"] * ranks,
        nodes=nodes or [0] * ranks,
        rows=rows,
        pairs=[Pair(a=0, b=ranks - 1, gb_s=3.0, latency=2e-5)],
        speeds=[Speed(rank=r, device=name, matmul_tflops=tflops, copy_gb_s=10.0 + r) for r in range(ranks)],
        fits=fits_of(rows),
        findings=[],
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    return tmp_path / "bench"


def test_without_a_measurement_there_is_no_here(cache: Path) -> None:
    with pytest.raises(UserError, match="run lockstep bench first"):
        find_machine("here")
    cache.mkdir()
    (cache / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="run lockstep bench first"):
        find_machine("here")


def test_here_is_what_bench_measured(cache: Path) -> None:
    write_bench(measured(4, "cpu", "CPU, 1 thread", {"fp32": 0.05}), cache / "new.json")
    old = measured(2, "cpu", "CPU, 2 threads", {"fp32": 0.1}).model_copy(update={"when": "2025-01-01T00:00:00+00:00"})
    write_bench(old, cache / "old.json")
    machine = find_machine("here")
    assert (machine.gpus_per_node, machine.nodes, machine.gpu.tflops["fp32"]) == (4, 1, 0.05)
    assert machine.gpu.memory_gb_s == 10.0
    assert machine.gpu.is_cpu
    assert "measured one, and this is" in machine.warnings[0]
    assert machine.inside.alpha == pytest.approx(10e-6, rel=0.01)
    assert 1e-9 / machine.inside.beta == pytest.approx(4.0, rel=0.01)


def test_cpu_ranks_share_cores_and_memory(cache: Path) -> None:
    write_bench(measured(4, "cpu", "CPU, 1 thread", {"fp32": 0.05}), cache / "new.json")
    four, two = find_machine("here"), find_machine("here", gpus=2)
    assert two.gpus == 2
    assert two.gpu.tflops["fp32"] == pytest.approx(0.1)
    assert two.gpu.memory_gb == pytest.approx(2 * four.gpu.memory_gb)
    assert four.gpu.usable == two.gpu.usable == find_gpu("laptop-cpu").usable < 0.9, "the system needs some"
    with pytest.raises(UserError, match="3 nodes were asked for"):
        find_machine("here", nodes=3)


def test_a_known_gpu_keeps_its_data_sheet_and_takes_the_measured_share(cache: Path) -> None:
    write_bench(measured(2, "cuda", "NVIDIA H200", {"bf16": 692.3, "fp32": 50.0}), cache / "new.json")
    machine = find_machine("here")
    assert (machine.gpu.name, machine.gpu.memory_gb) == ("H200-SXM-141", 141)
    assert machine.gpu.matmul == pytest.approx(0.7)
    with pytest.raises(UserError, match="4 ranks were asked for, and lockstep bench measured 2 a node on 1"):
        find_machine("here", gpus=4)
    assert not machine.gpu.is_cpu
    assert machine.host_gb is not None
    assert find_machine("here", gpus=1).with_gpus(2) == machine
    with pytest.raises(UserError, match="4 GPUs are more than a node of here, and what is between nodes was not"):
        machine.with_gpus(4)


def test_several_nodes_have_a_link_between_them(cache: Path) -> None:
    write_bench(measured(4, "cpu", "CPU, 1 thread", {"fp32": 0.05}, nodes=[0, 0, 1, 1]), cache / "new.json")
    machine = find_machine("here")
    assert (machine.gpus_per_node, machine.nodes) == (2, 2)
    assert 1e-9 / machine.outside.beta == pytest.approx(6.0)  # two ranks of a node with 3 GB/s each
