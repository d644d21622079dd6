"""How many blocks every rank of a pipeline has: memory and time are those of the same cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lockstep.parallel.pipeline.timetable import V_SHAPED
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.stack import BlocksOfStages


@dataclass(frozen=True)
class Stages:
    """A model over the ranks of a pipeline."""

    blocks: tuple[int, ...]
    """Of every rank, all its stages together."""
    head: int
    """The rank that has the last stage: the first one, where the pipeline goes down the ranks and up again."""
    differing: tuple[int, ...]
    """The ranks worth a look: the first, the last, and between them those that have more blocks than all before."""

    def slowest(self, head_work: float) -> tuple[int, bool]:
        """Blocks of the rank with most to do, and whether it is the one with the head, which counts as so many."""
        others = max((count for rank, count in enumerate(self.blocks) if rank != self.head), default=0)
        own = self.blocks[self.head]
        return (own, True) if own + head_work >= others else (others, False)


def stages_of_job(job: Job) -> Stages:
    """The cut of a job; as the engine does it for Lockstep's own stack."""
    model, turns = job.model, job.schedule in V_SHAPED
    return _stages(model.blocks.count, model.head_work, job.layout.pp, job.stages_per_rank, turns, job.stack.cut)


@lru_cache(maxsize=1 << 12)
def _stages(blocks: int, head_work: float, pp: int, per_rank: int, turns: bool, cut: BlocksOfStages) -> Stages:
    if cut != "evenly":
        stages = cut_by_work(blocks, head_work, pp * per_rank)
        if cut == "early":
            stages = [*stages[-2::-1], stages[-1]]
        if turns:
            own = tuple(stages[rank] + stages[-1 - rank] for rank in range(pp))
        else:
            own = tuple(sum(stages[rank::pp]) for rank in range(pp))
    else:
        own = tuple(blocks // pp + (rank < blocks % pp) for rank in range(pp))
    differing, most = [0], own[0]
    for rank in range(1, pp):
        if own[rank] > most or rank == pp - 1:
            differing.append(rank)
        most = max(most, own[rank])
    return Stages(own, 0 if turns else pp - 1, tuple(differing))


def cut_by_work(blocks: int, head_work: float, stages: int) -> list[int]:
    """Blocks of every stage as `modelplan.choose_cuts` has it, where every block is as much work as the others.

    The slowest stage is as fast as can be. Of equally good cuts it takes the earlier one, so that late stages are full
    and the first ones, which hold the most micro-batches, are not.
    """
    if stages == 1:
        return [blocks]
    before = stages - 1
    if blocks < before:  # the others have parts that are no blocks
        return [int(stage < blocks) for stage in range(stages)]
    last = min(range(blocks - before + 2), key=lambda own: (max(-(-(blocks - own) // before), own + head_work), -own))
    left, found = blocks - last, [last]
    for stage in range(before, 0, -1):
        # The embedding may be a stage of its own.
        own = left if stage == 1 else min(-(-left // stage), left - stage + 2)
        found.append(own)
        left -= own
    return found[::-1]
