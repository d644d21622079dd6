"""Published measurements as jobs: rows of a table, each a training somebody ran, with its time and memory.

A row that does not say enough to be a job is kept with the reason; what had to be assumed about a job is said with it.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, cast

from benchmarks.stacks import find_stack
from lockstep.config.schema import Schedule
from lockstep.errors import UserError
from lockstep.layout import Layout
from lockstep.planner.cost.job import Job, Recompute
from lockstep.planner.machine.find_machine import find_machine, network_link
from lockstep.planner.machine.hardware import Machine
from lockstep.planner.model.parts import Model, Shape
from lockstep.planner.model.transformer import transformer

Row = Mapping[str, str]

COLUMNS = ("id", "model", "layers", "hidden", "seq_len", "gpu", "n_gpus", "tp", "pp", "micro_batch", "global_batch")
"""What a table must have; the others may be missing."""

SOURCES = (
    ("torchtitan", "torchtitan"),
    ("llm-foundry", "composer"),
    ("nanotron", "nanotron"),
    ("ultra-scale", "nanotron"),
    ("gpt2.md [megatron]", "megatron"),
    ("bigscience", "deepspeed-megatron"),
    ("vtrain", "deepspeed-megatron"),
    ("deepspeed", "deepspeed-megatron"),
    ("llm.c", "llm.c"),
    ("megatron-bridge", "megatron-core"),
    ("nemo", "megatron-core"),
    ("megatron", "megatron"),
    ("korthikanti", "megatron"),
)
"""Whose software a source used: the first whose word stands in it."""

NETWORKS = (
    ("llm-foundry", "A100", 200.0, 0.05),  # "1600 Gbps node-node interconnect (RoCE)" in the headings of its tables
    ("tr11-176B", "A100", 50.0, 0.3),  # four Omni-Path links of 100 Gb/s a node (the README of that training)
    ("gpt2.md", "V100", 12.5, 0.3),  # shared/planner/hardware.csv: 6.8 to 10.6 measured
    ("vTrain", "A100", 100.0, 0.05),  # "inter_node 800 Gb/s" in its validation configs
    ("Ultra-Scale", "H100", 400.0, 0.5),  # EFA; its own medians fall from 362 GB/s on 2 nodes to 33 on 64
)
"""Network of a node where a source tells it: a word of the source, the GPU, GB/s, and how it falls with the nodes."""


@dataclass(frozen=True)
class Case:
    """One row: the job it describes, or the reason why it is none, and what was measured (None: not published)."""

    id: str
    family: str
    model: str
    job: Job | None
    reason: str
    assumed: tuple[str, ...]
    """What the row leaves open and was filled in."""
    step_seconds: float | None
    tokens_per_s_per_gpu: float | None
    memory_gib: float | None
    memory_metric: str
    status: str
    row: Row

    @property
    def seconds(self) -> float | None:
        """Of a step, from the step time or from tokens a second; the two never contradict each other in one row."""
        if self.step_seconds or not (self.job and self.tokens_per_s_per_gpu):
            return self.step_seconds
        return self.job.tokens / self.job.layout.world_size / self.tokens_per_s_per_gpu

    @property
    def out_of_memory(self) -> bool:
        """Published as such; a failure that may have had another cause is not."""
        return self.status.lower() == "oom"


class _UnreadableError(Exception):
    """A row is not a job."""


def read_cases(path: Path) -> list[Case]:
    """Every row of a table (`.csv` or `.csv.gz`) with the columns of the published cases."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = list(csv.DictReader(io.StringIO(raw.decode())))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}", "give a CSV file of published cases") from error
    missing = [column for column in COLUMNS if not rows or column not in rows[0]]
    if missing:
        raise UserError(f"{path} has no column {missing[0]}", f"give a CSV file with {', '.join(COLUMNS)}")
    return [read_case(row) for row in rows]


def read_case(row: Row) -> Case:
    """One row."""
    assumed: list[str] = []
    try:
        job, reason = _job(row, assumed), ""
    except _UnreadableError as error:
        job, reason = None, str(error)
    return Case(
        id=row["id"],
        family=row.get("family") or row["id"].rpartition("-")[0],
        model=row["model"],
        job=job,
        reason=reason,
        assumed=tuple(assumed),
        step_seconds=_measured(row, "step_time_s"),
        tokens_per_s_per_gpu=_measured(row, "tokens_per_s_per_gpu"),
        memory_gib=_measured(row, "memory_gib_per_gpu"),
        memory_metric=row.get("memory_metric", ""),
        status=row.get("status") or "ok",
        row=row,
    )


def _job(row: Row, assumed: list[str]) -> Job:
    stack = _stack(row)
    layout, zero = _layout(row)
    world = _count(row, "n_gpus")
    if layout.world_size != world:
        raise _UnreadableError(f"its layout {layout} has {layout.world_size} ranks, not the {world} GPUs it names")
    global_batch = _count(row, "global_batch")
    micro_batch = _micro_batch(row, layout, global_batch)
    model = _model(row, stack, layout, assumed)
    schedule, stages_per_rank = _schedule(row)
    recompute = row.get("activation_checkpointing", "").split(" ")[0] or "none"
    if not row.get("activation_checkpointing"):
        assumed.append("nothing recomputed")
    if recompute not in ("none", "selective", "full"):
        raise _UnreadableError(f"its recompute is {recompute}")
    attention = row.get("attn_impl", "")
    if not attention:
        assumed.append("attention without flash")
    return Job(
        model=model,
        machine=_machine(row, world),
        layout=layout,
        global_batch=global_batch,
        micro_batch=micro_batch,
        recompute=cast(Recompute, recompute),
        zero=zero,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        sequence_parallel=row.get("sequence_parallel") == "y" and layout.tp > 1,
        precision=_precision(row),
        async_tensor=_async_tensor(row, stack),
        flash="flash" in attention and "no flash" not in attention,
        compiled=row.get("compile") == "y",
        stack=find_stack(stack),
    )


def _layout(row: Row) -> tuple[Layout, Literal[0, 1, 2, 3]]:
    """Axes as we name them: data ranks that share optimizer state are `fsdp` at a level of ZeRO, else `dp`."""
    for column in ("dp_replicate", "dp_shard"):
        if not row.get(column):
            raise _UnreadableError("its layout is not published")
    replicas, shards = _count(row, "dp_replicate"), _count(row, "dp_shard")
    level = int(_number({"z": row.get("zero_stage", "").rstrip("?")}, "z") or 0)
    if level not in (0, 1, 2, 3):
        raise _UnreadableError(f"its ZeRO stage is {level}")
    if level == 0:
        replicas, shards = replicas * shards, 1
    elif shards == 1:
        replicas, shards = 1, replicas
    context = int(_number(row, "cp") or 1)
    layout = Layout(pp=_count(row, "pp"), dp=replicas, fsdp=shards, cp=context, tp=_count(row, "tp"))
    return layout, cast(Literal[0, 1, 2, 3], level)


def _micro_batch(row: Row, layout: Layout, global_batch: int) -> int:
    micro = _number(row, "micro_batch")
    steps = _number(row, "grad_accum")
    if not micro and steps:
        micro = global_batch / layout.data_size / steps
    if not micro or micro < 1:
        raise _UnreadableError("its micro_batch is not published")
    return int(micro)


def _model(row: Row, stack: str, layout: Layout, assumed: list[str]) -> Model:
    hidden, sequence = _count(row, "hidden"), _count(row, "seq_len")
    parameters = 1e9 * (_number(row, "params_B") or 0.0)
    vocab = int(_number(row, "vocab") or 0)
    if not vocab:
        vocab = 51200
        assumed.append("a vocabulary of 51200, Megatron's")
    gated = any(word in row["model"].lower() for word in ("llama", "mistral", "qwen"))
    ffn = int(_number(row, "ffn_hidden") or 4 * hidden)
    layers = int(_number(row, "layers") or 0)
    if not layers:
        if not parameters:
            raise _UnreadableError("its layers are not published")
        layers = round((parameters - vocab * hidden) / (4 * hidden**2 + (3 if gated else 2) * hidden * ffn))
        assumed.append(f"{layers} layers, from its parameters")
    heads = int(_number(row, "heads") or 0)
    if not heads:
        possible = [count for count in range(layout.tp, hidden + 1, layout.tp) if hidden % count == 0]
        heads = min(possible, key=lambda count: abs(hidden / count - 128))
        assumed.append(f"{heads} heads")
    shape = Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        vocab=vocab,
        kv_heads=int(_number(row, "kv_heads") or heads),
        gated=gated,
        tied=not gated,
        positions=0 if gated else sequence,
        biases=not gated and stack != "composer",
        norm="rms" if gated else "layer",
        dropout=stack in ("megatron", "deepspeed-megatron") and not gated,
    )
    return _nearest(row["model"], shape, sequence, parameters)


@lru_cache(maxsize=512)
def _nearest(name: str, shape: Shape, sequence: int, parameters: float) -> Model:
    """With the head tied to the embedding or not, whichever is nearer to the number of parameters published."""
    usual = transformer(name, shape, sequence)
    other = transformer(name, _retied(shape), sequence)
    if not parameters or abs(usual.parameters - parameters) <= abs(other.parameters - parameters):
        return usual
    # A rounded number ("7.5") says nothing about a difference that is smaller than its last figure.
    return other if abs(usual.parameters / parameters - 1) > 0.03 else usual


def _retied(shape: Shape) -> Shape:
    return Shape(**{**shape.__dict__, "tied": not shape.tied})


def _schedule(row: Row) -> tuple[Schedule, int]:
    text = row.get("schedule", "").lower()
    stages = re.search(r"v\s*=\s*(\d+)", text)
    for word, schedule, usual in (
        ("gpipe", "gpipe", 1),
        ("dualpipe", "dualpipev", 2),
        ("zbv", "zbv", 2),
        ("zero", "interleaved-zero-bubble", 2),
        ("interleaved", "interleaved-1f1b", 2),
    ):
        if word in text:
            return cast(Schedule, schedule), int(stages.group(1)) if stages else usual
    return "1f1b", 1


def _precision(row: Row) -> Literal["fp32", "fp16", "bf16", "fp8", "fp4"]:
    text = row.get("precision", "").lower()
    names: tuple[Literal["fp32", "fp16", "bf16", "fp8", "fp4"], ...] = ("bf16", "fp16", "fp32", "fp8", "fp4")
    if "fp8" in text and "rowwise" in row.get("notes", ""):
        return "bf16"  # scales for every row cost what narrow products gain: torchtitan's tables show the speed of bf16
    for name in names:
        if name in text:
            return name
    raise _UnreadableError("its precision is not published")


def _async_tensor(row: Row, stack: str) -> bool:
    notes = row.get("notes", "").lower()
    return "async tp" in notes or "asynctp" in notes or stack == "megatron-core"


def _stack(row: Row) -> str:
    source = f"{row.get('source', '')} {row.get('family', '')} {row['id']}".lower()
    stack = next((stack for word, stack in SOURCES if word in source), "megatron")
    return f"{stack}-2025" if stack == "torchtitan" and "2025" in source else stack


def _machine(row: Row, world: int) -> Machine:
    if not row["gpu"]:
        raise _UnreadableError("its GPU is not published")
    try:
        machine = find_machine(row["gpu"])
    except UserError as error:
        raise _UnreadableError(error.cause) from error
    # What a catalogue calls a node is the reach of NVLink, which may be more than one box.
    node = min(max(machine.gpus_per_node, 8) if "NVL72" in row["gpu"] else _count(row, "gpus_per_node"), world)
    machine = replace(machine, name=f"{row['gpu']} x {world}", gpus_per_node=node, nodes=-(-world // node))
    for word, kind, speed, falls in NETWORKS:
        if word in row.get("source", "") and kind in row["gpu"]:
            return replace(machine, outside=network_link(speed), congestion=falls)
    return machine


def _measured(row: Row, column: str) -> float | None:
    try:
        return _number(row, column)
    except _UnreadableError:
        return None


def _number(row: Row, column: str) -> float | None:
    text = row.get(column) or ""
    try:
        return float(text) if text else None
    except ValueError:
        raise _UnreadableError(f"its {column} is {text!r}") from None


def _count(row: Row, column: str) -> int:
    value = _number(row, column)
    if not value or value < 1:
        raise _UnreadableError(f"its {column} is not published")
    return int(value)
