"""Where the bytes of an estimate come from: each term with formula and numbers, beside a course's arithmetic.

The course is a public one on training large models; its slides estimate GPT-2 1.5B and show the memory of four models.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.planner.cost.estimate import Memory
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory, flights_of, logit_bytes, states
from lockstep.planner.cost.stack import TrainingStack
from lockstep.planner.cost.stages import stages_of_job
from lockstep.planner.model.find_model import find_model

GB = 1e9
GIB = 2.0**30

ZERO_PAPER = TrainingStack("zero-paper", weights=2.0, gradients=2.0, optimizer=12.0, gathered=2.0, summed=2.0, band=0.0)
"""ZeRO's arithmetic: weights and gradients in fp16, 12 bytes of optimizer state (arXiv 1910.02054, Figure 1)."""


@dataclass(frozen=True)
class Comparison:
    """One term twice."""

    term: str
    course: str
    course_gb: float
    ours: str
    ours_gb: float
    why: str


def gpt2_rows(batch: int = 32) -> list[Comparison]:
    """GPT-2 1.5B in fp32, 32 samples of 1024 tokens: 6 + 6 + 18 + 56.43, about 87 GB, and what a step really holds."""
    model = find_model("gpt2-xl", 1024, {"dropout": False})
    block, attention = model.blocks, model.blocks.attention
    assert attention is not None
    ours = float(model.parameters)
    wide = batch * block.border * 4.0
    kept = batch * (4.0 * (block.kept + block.cut_kept) + block.kept_bytes)
    scores = batch * attention.scores * 4.0
    same = f"4 x {ours / GB:.3f}e9", 4 * ours / GB
    values = "16 values of width h: 4 at norms, 4 of attention, 8 of the MLP"
    rows = (
        (("parameters", "4 x 1.5e9", 4 * 1.5), same, "the model has 1.558e9, embeddings counted once"),
        (("gradients", "4 x 1.5e9", 4 * 1.5), same, "the same"),
        (
            ("Adam", "3 x 4 x 1.5e9", 12 * 1.5),
            (f"2 x 4 x {ours / GB:.3f}e9", 8 * ours / GB),
            "the course counts the fp32 weights a second time; Adam has two moments, and the weights are fp32 already",
        ),
        (
            ("embeddings", "32 x 1024 x 1600 x 4 + 1024 x 1600 x 4 (GiB)", (wide + 1024 * 1600 * 4) / GIB),
            ("indices, 8 bytes a token", batch * 1024 * 8 / GB),
            "their sum is what the first block reads, and is counted there",
        ),
        (
            ("activations of blocks", "48 x 6 x 32 x 1024 x 1600 x 4 (GiB)", 48 * 6 * wide / GIB),
            (f"48 x ({values}) x 32 x 1024 x 1600 x 4", 48 * kept / GB),
            "the course takes 6 values of width h a block and leaves out the MLP's 4h, before and after its GELU",
        ),
        (
            ("attention scores", "none", 0.0),
            ("48 x 25 x 1024 x 1024 x 32 x 4, none with flash attention", 48 * scores / GB),
            "the course leaves out the square of scores, which attention without flash keeps",
        ),
        (
            ("logits", "none", 0.0),
            ("12 x 32 x 1024 x 50257", 12.0 * batch * model.logits / GB),
            "the loss in fp32: log-softmax, its gradient and that of the logits are there at once",
        ),
    )
    return [Comparison(*course, *own, why) for course, own, why in rows]


def model_rows() -> list[tuple[str, float, float]]:
    """The course's table of models: name, billions of parameters, GB. It is 16 bytes a parameter, and no activations.

    Mixed precision with Adam: 2 + 2 for weights and gradients in 16 bits, 4 + 4 + 4 for weights and moments in fp32.
    """
    known = (("BERT-Large", 0.32), ("GPT-2", 1.5), ("Turing 17.2 NLG", 17.2), ("GPT-3", 175.0))
    return [(name, billions, sum(states(ZERO_PAPER, billions, 0, 1))) for name, billions in known]


def zero_rows(billions: float = 7.5, ranks: int = 64) -> list[tuple[str, str, float]]:
    """ZeRO's table: what is sharded, the formula, GB of model states on every rank."""
    formulas = (
        ("nothing", "(2 + 2 + 12) n"),
        ("optimizer state", "(2 + 2) n + 12 n / N"),
        ("gradients too", "2 n + (2 + 12) n / N"),
        ("weights too", "(2 + 2 + 12) n / N"),
    )
    return [(what, text, sum(states(ZERO_PAPER, billions, zero, ranks))) for zero, (what, text) in enumerate(formulas)]


def course_text() -> str:
    """The worked examples, for people."""
    lines = ["GPT-2 1.5B, fp32, 32 samples of 1024 tokens: the course's terms, and ours", ""]
    rows = gpt2_rows()
    lines.append(f"{'':24}{'course':>9}{'ours':>9}  GB")
    for row in rows:
        lines += [f"{row.term:24}{row.course_gb:9.2f}{row.ours_gb:9.2f}  course: {row.course}"]
        lines += [f"{'':44}ours: {row.ours}", f"{'':44}{row.why}"]
    course, ours = sum(row.course_gb for row in rows), sum(row.ours_gb for row in rows)
    lines += [f"{'sum':24}{course:9.2f}{ours:9.2f}  the course prints 6 + 6 + 18 + 56.43 = 86.43, about 87", ""]
    lines.append("The course's table of models is 16 bytes a parameter: weights, gradients and Adam, no activations")
    lines += [f"{name:24}{billions:7.2f} B{total:9.4g} GB" for name, billions, total in model_rows()]
    lines += ["", "ZeRO, 7.5 B parameters (n) on 64 ranks (N), model states alone"]
    lines += [f"{what:24}{total:7.1f} GB  {formula}" for what, formula, total in zero_rows()]
    return "\n".join(lines)


def explain_text(job: Job) -> str:
    """Every term of a job's memory, with its formula and the numbers put in."""
    blocks = stages_of_job(job).blocks
    memories = estimate_memory(job)
    lines = [f"{job.model.name} on {job.layout}, {job.machine.name}: what a rank holds at its fullest moment"]
    for memory in memories:
        if len(memories) > 1:
            lines += ["", f"pipeline rank {memory.stage + 1} of {job.layout.pp}"]
        own = blocks[memory.stage]
        lines += [f"  {name:15}{value / GB:10.3f} GB  {how}" for name, value, how in _terms(job, memory, own)]
        total = memory.total / GB
        low, high = total * (1 - memory.band), total * (1 + memory.band)
        lines.append(f"  {'sum':15}{total:10.3f} GB  between {low:.3g} and {high:.3g} ({memory.band:.0%} either way)")
        lines.append(
            f"  {'host memory':15}{memory.host / GB:10.3f} GB  where a background save copies weights and moments to"
        )
    return "\n".join(lines)


def _terms(job: Job, memory: Memory, blocks: int) -> list[tuple[str, float, str]]:
    stack = job.stack
    layout = job.layout
    shards = layout.fsdp * (layout.cp if stack.shards_over_context else 1)
    count = memory.optimizer / stack.optimizer * (shards if job.effective_zero else 1)
    rank = f"{count:.4g} parameters of this rank"
    sharded = f" / {shards}" if shards > 1 else ""
    flights = flights_of(job, memory.stage)
    held = memory.parameters * shards > 1.5 * stack.weights * count
    kept = {
        "none": "everything the backward needs",
        "selective": "all but what is cheap to compute again",
        "full": "the input of every block, and one block that is computed again",
    }[job.recompute]
    attention = "" if job.uses_flash else ", scores of attention too"
    whole = sharded if memory.gradients < 0.9 * stack.gradients * count else ", whole on every rank"
    flying = f"{blocks:g} blocks x {flights:g} micro-batches of {job.micro_batch} in flight"
    fragments = f"{stack.fragments:.0%} of all but the states held by the allocator"
    terms = [
        ("parameters", memory.parameters, f"{stack.weights:g} x {rank}{'' if held else sharded}"),
        ("gradients", memory.gradients, f"{stack.gradients:g} x {count:.4g}{whole}"),
        ("optimizer", memory.optimizer, f"{stack.optimizer:g} x {count:.4g}{sharded if job.effective_zero else ''}"),
        ("activations", memory.activations, f"{flying}: {kept}{attention}"),
        ("logits", memory.logits, f"up to {logit_bytes(job):g} bytes a logit while the loss is gone back through"),
        ("communication", memory.communication, _communication(job)),
        ("slack", memory.slack, f"{fragments}, {stack.base / GB:g} GB by libraries"),
        ("shared", -memory.shared, "gradients come into being where activations were"),
    ]
    return [term for term in terms if term[1]]


def _communication(job: Job) -> str:
    parts = ["gathered weights and gradients on their way"] * (job.effective_zero > 1 and job.layout.fsdp > 1)
    parts += ["gradient buckets"] * (job.effective_zero < 2 and job.layout.data_size > 1)
    parts += ["what pipeline neighbours send"] * (job.layout.pp > 1)
    return ", ".join(parts)
