"""Rows of published tables become jobs, or say why not."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest

from benchmarks.published_cases import read_case, read_cases
from lockstep.errors import UserError

GRID = {
    "id": "nanotron-grid-0001",
    "source": "HF Ultra-Scale Playbook",
    "model": "Llama-like-8.86B",
    "params_B": "8.86",
    "layers": "32.0",
    "hidden": "4096.0",
    "heads": "32.0",
    "kv_heads": "32.0",
    "ffn_hidden": "14336.0",
    "vocab": "131072.0",
    "seq_len": "4096.0",
    "gpu": "H100-SXM-80",
    "n_gpus": "64.0",
    "gpus_per_node": "8.0",
    "dp_replicate": "16.0",
    "dp_shard": "1.0",
    "tp": "2.0",
    "pp": "2.0",
    "cp": "1.0",
    "zero_stage": "1",
    "sequence_parallel": "y",
    "schedule": "1F1B",
    "micro_batch": "2.0",
    "global_batch": "256.0",
    "activation_checkpointing": "none (not printed)",
    "precision": "bf16",
    "compile": "n",
    "attn_impl": "flash2",
    "tokens_per_s_per_gpu": "1000",
    "memory_gib_per_gpu": "60.2",
    "status": "ok",
    "family": "nanotron-grid",
}
"""As in the table of the Ultra-Scale Playbook."""


def test_a_row_is_the_job_it_describes() -> None:
    case = read_case(GRID)
    job = case.job
    assert job is not None
    assert str(job.layout) == "pp=2,fsdp=16,tp=2", "data ranks that share optimizer state are shards"
    assert (job.zero, job.stack.name, job.schedule, job.recompute) == (1, "nanotron", "1f1b", "none")
    assert (job.sequence_parallel, job.flash, job.compiled) == (True, True, False)
    assert job.micro_batches == 8
    assert job.model.parameters == pytest.approx(8.86e9, rel=0.002), "its head is not tied"
    assert (case.memory_gib, case.step_seconds) == (60.2, None)
    assert case.seconds == pytest.approx(256 * 4096 / 64 / 1000)
    assert (job.machine.nodes, job.machine.gpus_per_node) == (8, 8)


def test_a_head_is_tied_where_that_meets_the_published_parameters() -> None:
    small = GRID | {"params_B": "1.34", "layers": "16", "hidden": "2048", "ffn_hidden": "8192"}
    job = read_case(small).job
    assert job is not None
    assert job.model.parameters == pytest.approx(1.34e9, rel=0.002)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "32"}, "its layout pp=2,fsdp=16,tp=2 has 64 ranks, not the 32 GPUs it names"),
        ({"micro_batch": ""}, "its micro_batch is not published"),
        ({"hidden": ""}, "its hidden is not published"),
        ({"dp_shard": ""}, "its layout is not published"),
        ({"gpu": "H1"}, "unknown cluster 'H1'"),
        ({"layers": "many"}, "its layers is 'many'"),
    ],
)
def test_what_is_not_a_job_says_why(change: dict[str, str], reason: str) -> None:
    case = read_case(GRID | change)
    assert case.job is None
    assert case.reason == reason
    assert case.memory_gib == 60.2


def test_what_was_assumed_is_said() -> None:
    case = read_case(GRID | {"vocab": "", "heads": "", "activation_checkpointing": ""})
    assert case.assumed == ("a vocabulary of 51200, Megatron's", "32 heads", "nothing recomputed")


def test_schedules_by_the_names_their_sources_use() -> None:
    for text, expected in (
        ("interleaved v=4", ("interleaved-1f1b", 4)),
        ("Interleaved1F1B", ("interleaved-1f1b", 2)),
        ("GPipe", ("gpipe", 1)),
        ("ZBVZeroBubble", ("zbv", 2)),
    ):
        job = read_case(GRID | {"schedule": text}).job
        assert job is not None
        assert (job.schedule, job.stages_per_rank) == expected


def test_a_table_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv.gz"
    with gzip.open(path, "wt") as file:
        table = csv.DictWriter(file, GRID)
        table.writeheader()
        table.writerows([GRID, GRID | {"id": "nanotron-grid-0002", "hidden": "", "status": "oom"}])
    first, second = read_cases(path)
    assert first.job is not None
    assert second.reason
    assert second.out_of_memory
    with pytest.raises(UserError, match="cannot read"):
        read_cases(tmp_path / "nothing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no column id"):
        read_cases(tmp_path / "other.csv")
