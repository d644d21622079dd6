"""What to change: at most three sentences, what wins most first, each with the numbers of this run that say so.

Every rule looks at the summary of a run and answers with what its advice would win, in seconds of the run, or with
nothing. What a rule cannot measure (what a larger micro-batch wins, say) it puts low, and says so where it does.
"""

from __future__ import annotations

from lockstep.page.advice import machine_rules, run_rules, step_rules
from lockstep.page.panels import Advice
from lockstep.page.reading.summary import Summary

MOST = 3
LEAST_SECONDS = 1.0
LEAST_SHARE = 0.01
"""What advice has to win, of the time in which the run was not stopped; less is not worth a sentence."""

RULES = (
    run_rules.restart_loop,
    run_rules.repeated_work,
    run_rules.checkpoint_stalls,
    run_rules.long_start,
    run_rules.stood_still,
    run_rules.much_validation,
    run_rules.lost_steps,
    run_rules.much_padding,
    step_rules.slow_input_of_a_rank,
    step_rules.slow_compute_of_a_rank,
    step_rules.all_wait_for_data,
    step_rules.exposed_communication,
    step_rules.between_steps,
    machine_rules.unused_gpus,
    machine_rules.too_many_threads,
    machine_rules.full_precision,
    machine_rules.small_micro_batch,
    machine_rules.nearly_full,
)


def advise(summary: Summary) -> list[Advice]:
    """What to change in a run, which may still be going; empty where nothing stands out."""
    least = max(LEAST_SECONDS, LEAST_SHARE * (summary.spent.whole - summary.spent.stopped))
    found = [answer for rule in RULES if (answer := rule(summary)) is not None and answer[0] >= least]
    # Sorted by what they win alone: of equals the rule that stands first comes first.
    return [advice for _, advice in sorted(found, key=lambda answer: -answer[0])][:MOST]
