"""What to change: at most three sentences, what wins most first, each with the numbers of this run that say so.

Every rule looks at the summary of a run and answers with what its advice would win, in seconds of the run, or with
nothing. What a rule cannot measure (what a larger micro-batch wins, say) it puts low, and says so where it does.
"""

from __future__ import annotations

from lockstep.page import advice_machine, advice_run, advice_steps
from lockstep.page.panels import Advice
from lockstep.page.summary import Summary

MOST = 3
LEAST_SECONDS = 1.0
LEAST_SHARE = 0.01
"""What advice has to win, of the time in which the run was not stopped; less is not worth a sentence."""

RULES = (
    advice_run.restart_loop,
    advice_run.repeated_work,
    advice_run.checkpoint_stalls,
    advice_run.long_start,
    advice_run.stood_still,
    advice_run.much_validation,
    advice_run.lost_steps,
    advice_run.much_padding,
    advice_steps.slow_input_of_a_rank,
    advice_steps.slow_compute_of_a_rank,
    advice_steps.all_wait_for_data,
    advice_steps.exposed_communication,
    advice_steps.between_steps,
    advice_machine.unused_gpus,
    advice_machine.too_many_threads,
    advice_machine.full_precision,
    advice_machine.small_micro_batch,
    advice_machine.nearly_full,
)


def advise(summary: Summary) -> list[Advice]:
    """What to change in a run, which may still be going; empty where nothing stands out."""
    least = max(LEAST_SECONDS, LEAST_SHARE * (summary.spent.whole - summary.spent.stopped))
    found = [answer for rule in RULES if (answer := rule(summary)) is not None and answer[0] >= least]
    # Sorted by what they win alone: of equals the rule that stands first comes first.
    return [advice for _, advice in sorted(found, key=lambda answer: -answer[0])][:MOST]
