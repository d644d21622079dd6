"""What to change: every planted problem is named first, with its numbers, and none where all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.page.advice.choose import RULES, advise
from lockstep.page.panels import Advice
from lockstep.page.reading.summary import HostSummary, RankSummary, Summary, TimeSpent
from tests.summaries import GB, SPENT, a_gpu, a_rank, a_straggler, an_attempt, healthy


def ranks_but(number: int, **changes: Any) -> list[RankSummary]:
    """Four ranks that wait for the one that is `number`."""
    late = sum(changes.values()) - sum(getattr(a_rank(0), name) for name in changes)
    return [a_rank(rank, **changes) if rank == number else a_rank(rank, wait=0.04 + late) for rank in range(4)]


def all_ranks(**changes: Any) -> list[RankSummary]:
    return [a_rank(rank, **changes) for rank in range(4)]


def first(summary: Summary) -> Advice:
    found = advise(summary)
    assert found, "nothing was said"
    assert len(found) <= 3
    return found[0]


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    assert advise(healthy()) == []
    assert advise(healthy(state="running", steps=400, attempts=[an_attempt(state="running", last_step=400)])) == []


def test_a_run_that_has_just_begun_is_told_nothing() -> None:
    empty = TimeSpent(starting=0.5)
    begun = healthy(
        state="running", steps=0, spent=empty, ranks=[], hosts=[], gpus=[], attempts=[], loss=None, step_seconds=None,
        items=0, padding=0, mfu=None, checkpoints=0, checkpoint_stalls=0.0, saved_step=None,
    )  # fmt: skip
    assert advise(begun) == []
    assert advise(replace(begun, spent=TimeSpent())) == []


# ---- A GPU nobody uses


def test_a_gpu_nobody_uses_is_named_with_what_it_costs() -> None:
    """Three of four GPUs have ranks; a quarter of 440 s is 110 s."""
    gpus = [*(a_gpu(index) for index in range(3)), a_gpu(3, busy=0.0, memory=GB // 2, ranks=())]
    advice = first(healthy(gpus=gpus, world_size=3, layout="dp=3", ranks=all_ranks()[:3]))
    assert advice.text == (
        "GPU 3 of node1 (NVIDIA H200) is used by nobody: start a rank on it (--nproc 4), or ask for fewer GPUs."
    )
    assert advice.evidence == "1 of the 4 GPUs has no rank: 25 % of what the node of this run costs."
    assert advice.section == "machine"


def test_several_unused_gpus_are_named_host_by_host() -> None:
    gpus = [a_gpu(index, host, ranks=(0,) if index == 0 else (), busy=0.0) for host in "abcde" for index in range(3)]
    gpus = [replace(gpu, memory=0) if not gpu.ranks else gpu for gpu in gpus]
    advice = first(healthy(gpus=gpus, nodes=5))
    assert "GPUs 1, 2 of a and GPUs 1, 2 of b and GPUs 1, 2 of c and those of 2 more hosts" in advice.text
    assert "10 of the 15 GPUs have no rank: 67 % of what the nodes of this run cost." in advice.evidence


def test_gpus_beside_a_training_on_cpus_are_unused_too() -> None:
    gpus = [a_gpu(0, busy=0.0, memory=0, ranks=())]
    advice = first(healthy(gpus=gpus, device="cpu"))
    assert advice.text == (
        "GPU 0 of node1 (NVIDIA H200) is used by nobody: leave --device cpu out; where nobody said it, torch does not "
        "see it (CUDA_VISIBLE_DEVICES, or a build for CPUs)."
    )
    assert advice.evidence == "The run has 4 ranks on CPUs, and none on the 1 idle GPU of its node."


@pytest.mark.parametrize("changes", [{"busy": 0.8}, {"memory": 60 * GB}, {"busy": None, "memory": None}])
def test_a_gpu_that_somebody_else_uses_or_that_nobody_measured_is_left_alone(changes: dict[str, Any]) -> None:
    other = a_gpu(4, **{"busy": 0.0, "memory": 0, "ranks": (), **changes})
    assert advise(healthy(gpus=[*healthy().gpus, other])) == []


# ---- Slow ranks


def test_slow_input_of_one_rank_names_rank_and_host() -> None:
    """0.2 s instead of 4 ms, so that a step takes 0.596 s: 196 of 596 ms."""
    slow = healthy(ranks=ranks_but(2, input=0.2), stragglers=[a_straggler(2, "input", 0.2, 0.004)])
    advice = first(slow)
    assert advice.text == (
        "Rank 2 (node1) waits for its data, and all others wait for it: give it more data.workers than the 4 of now, "
        "or put its data on a faster disk."
    )
    assert advice.evidence == (
        "Its data take 200 ms of a mean step of 596 ms, those of the others 4 ms: "
        "the difference is 33 % of the time in steps."
    )
    assert advice.section == "ranks"
    assert advise(replace(slow, ranks=all_ranks())) == [], "it was slow for a while, not on average"
    assert advise(replace(slow, stragglers=[])) == [], "the run itself has not found it twice in a row"


def test_where_the_cores_are_busy_more_workers_are_not_the_answer() -> None:
    slow = healthy(
        ranks=ranks_but(2, input=0.2),
        stragglers=[a_straggler(2, "input", 0.2, 0.004)],
        hosts=[HostSummary("node1", 64, 0.97, 4)],
    )
    assert "the cores of node1 are 97 % busy, so prepare its data beforehand" in first(slow).text


def test_cores_that_the_run_itself_keeps_busy_are_busy_however_many_others_the_host_has() -> None:
    """8 of 128 cores, all of them at work: 6 % of the host."""
    few = [HostSummary("node1", 8, 0.06, 4)]
    late = [replace(rank, threads=2, workers=0) for rank in ranks_but(2, input=0.2)]
    slow = healthy(ranks=late, stragglers=[a_straggler(2, "input", 0.2, 0.004)], hosts=few)
    assert "the cores of node1 are 100 % busy, so prepare its data beforehand" in first(slow).text
    starved = healthy(ranks=all_ranks(input=0.104, threads=2, workers=0), hosts=few)
    assert "the cores are 100 % busy, so prepare the data beforehand" in first(starved).text
    idle = [replace(rank, cores=1.0) for rank in starved.ranks]
    assert "use more data.workers" in first(replace(starved, ranks=idle)).text


def test_slow_compute_of_one_rank_names_rank_and_host() -> None:
    slow = healthy(ranks=ranks_but(1, compute=0.56), stragglers=[a_straggler(1, "compute", 0.596, 0.356)])
    advice = first(slow)
    assert advice.text == (
        "Rank 1 (node1) computes longer than the others, which wait for it: look at its device (lockstep doctor), or "
        "at what only this rank does."
    )
    assert advice.evidence == (
        "It computes 596 ms of a mean step of 640 ms, the others 356 ms: the difference is 38 % of the time in steps."
    )
    assert len(advise(slow)) == 1, "that the others wait is no communication"
    assert advise(replace(slow, ranks=all_ranks())) == []


def test_code_between_steps_on_one_rank_alone_is_told_as_such() -> None:
    slow = healthy(ranks=ranks_but(0, between=0.208), stragglers=[a_straggler(0, "compute", 0.556, 0.356)])
    assert "let all ranks share what its script does between two steps" in first(slow).text


def test_the_larger_place_of_a_pipeline_is_no_slow_device() -> None:
    """Ranks 2 and 3 are the second place of pp=2,dp=2, and compute 0.2 s longer."""
    ranks = [a_rank(rank, compute=0.52 if rank > 1 else 0.32, wait=0.04 if rank > 1 else 0.24) for rank in range(4)]
    slow = healthy(layout="pp=2,dp=2", ranks=ranks, stragglers=[a_straggler(2, "compute", 0.556, 0.356)])
    assert first(slow).text.startswith("The place of the pipeline that rank 2 (node1) is at computes longer")
    assert "pipeline.cuts" in first(slow).text


# ---- What all ranks wait for


def test_all_ranks_that_wait_for_data() -> None:
    """0.104 s of 0.5 s."""
    advice = first(healthy(ranks=all_ranks(input=0.104, workers=0)))
    assert advice.text == "The training waits for its data: use more data.workers (it has none), or a faster disk."
    assert advice.evidence == "Every rank waited 104 ms of a mean step of 500 ms, 21 %."
    busy = healthy(ranks=all_ranks(input=0.104), hosts=[HostSummary("node1", 64, 0.99, 4)])
    assert "the cores are 99 % busy, so prepare the data beforehand" in first(busy).text
    assert advise(healthy(ranks=[*all_ranks(input=0.104)[1:], a_rank(0)])) == [], "one of them has its data in time"


def test_a_few_steps_say_nothing_unless_the_run_itself_has_said_it() -> None:
    short = healthy(ranks=all_ranks(input=0.104), steps=12, spent=TimeSpent(useful=5, input=1.3, starting=3))
    assert advise(short) == []
    assert "waits for its data" in first(replace(short, stragglers=[a_straggler(None, "input", 0.104, None)])).text


def test_exposed_communication_is_what_even_the_last_to_come_waits_for() -> None:
    """0.18 s of 0.54 s."""
    advice = first(healthy(ranks=all_ranks(wait=0.18)))
    assert advice.text.startswith("The ranks wait for each other: dp sums all gradients in every step, so send half")
    assert "lockstep plan ranks the layouts, lockstep bench finds a slow link" in advice.text
    assert (
        advice.evidence
        == "Rank 0, which waits least (all ranks on average: 180 ms), waited 180 ms of a mean step of 540 ms, 33 %."
    )
    assert advice.section == "time"
    assert advise(healthy(ranks=[*all_ranks(wait=0.18)[1:], a_rank(0)])) == [], "they wait for rank 0"
    assert advise(healthy(world_size=1, layout="single", ranks=[a_rank(0, wait=0.18)], gpus=[a_gpu(0)])) == []


@pytest.mark.parametrize(
    ("layout", "nodes", "fix"),
    [
        ("tp=4", 1, "as in fsdp=2,tp=2;"),
        ("tp=4", 2, "keep it inside one, tp=2 at most"),
        ("pp=4", 1, "more pipeline.micro_batches"),
        ("cp=4", 1, "cp=4 sends keys and values"),
        ("fsdp=4", 1, 'so try dp=4 where that fits, else shard.level = "zero2"'),
        ("fsdp=4", 2, "shard inside the nodes alone, as in dp=2,fsdp=2;"),
        ("no=layout", 1, "try a layout that sends less"),
    ],
)
def test_the_axis_that_talks_decides_what_to_try(layout: str, nodes: int, fix: str) -> None:
    assert fix in first(healthy(ranks=all_ranks(wait=0.18), layout=layout, nodes=nodes)).text


def test_on_the_cpus_of_one_node_there_is_no_network_to_spare() -> None:
    cpus = healthy(ranks=all_ranks(wait=0.18), device="cpu", gpus=[])
    assert "fewer ranks than 4 with more threads may be faster" in first(cpus).text
    assert "send half with numerics.reduce_dtype" in first(replace(cpus, nodes=2)).text


def test_code_between_steps_on_all_ranks() -> None:
    advice = first(healthy(ranks=all_ranks(between=0.108)))
    assert advice.text.startswith("The script's own code between two steps takes long: do it less often")
    assert advice.evidence == "Between two steps went 108 ms of a mean step of 500 ms, 22 %."


# ---- The machine


def test_more_threads_than_cores_are_counted_out() -> None:
    """4 x 8 threads and 4 x 4 workers on 16 cores: three for each."""
    crowded = healthy(hosts=[HostSummary("node1", 16, 0.98, 4)])
    advice = first(crowded)
    assert advice.text == (
        "The CPUs of node1 are oversubscribed, and its threads wait for a core: start with OMP_NUM_THREADS=1 and "
        "fewer data.workers."
    )
    assert advice.evidence == (
        "4 ranks with 8 threads each and 16 data workers want 48 cores; node1 has 16, 98 % busy."
    )
    assert advice.section == "machine"
    assert advise(replace(crowded, hosts=[HostSummary("node1", 16, 0.3, 4)])) == [], "threads that sleep"
    some_of_many = replace(crowded, hosts=[HostSummary("node1", 16, 0.1, 4)], ranks=all_ranks(cores=3.9))
    assert "node1 has 16, 98 % busy" in first(some_of_many).evidence, "16 of the 160 cores of the host are the run's"
    assert advise(replace(crowded, hosts=[HostSummary("node1", 48, 0.98, 4)])) == [], "a core for each"


def test_without_workers_the_ranks_themselves_may_be_too_many() -> None:
    crowded = healthy(hosts=[HostSummary("node1", 2, 1.0, 4)], ranks=all_ranks(threads=2, workers=0))
    assert first(crowded).text.endswith("start with OMP_NUM_THREADS=1, or with fewer ranks.")


def test_fp32_on_a_gpu_that_only_computes() -> None:
    """0.32 of 0.364 s are compute."""
    busy = {"ranks": all_ranks(wait=0.004), "precision": "fp32"}
    advice = first(healthy(**busy))
    assert advice.text.startswith('The GPUs compute matrix products in fp32: use precision = "bf16"')
    assert advice.evidence == "88 % of the time in steps is compute, at 400 TFLOP/s a GPU."
    assert advise(healthy(**busy, device="cpu", gpus=[])) == []
    assert advise(healthy(**busy, spent=TimeSpent(useful=10, starting=5))) == [], "a short run"


def idle_gpus(**changes: Any) -> Summary:
    gpus = [a_gpu(index, busy=0.4, memory=30 * GB) for index in range(4)]
    return healthy(**{"ranks": all_ranks(wait=0.004), "gpus": gpus, **changes})


def test_gpus_with_little_to_do_and_free_memory_want_a_larger_micro_batch() -> None:
    """20 % full: four times as much fits under 80 %, but a rank has only 16 samples of a step, twice its 8."""
    advice = first(idle_gpus())
    assert advice.text == "The GPUs have little to do at once, and much free memory: raise micro_batch from 8 to 16."
    assert advice.evidence == "The GPUs are 40 % busy, and 20 % of the memory of the fullest is held."
    assert "raise micro_batch from 2 to 8" in first(idle_gpus(micro_batch=2)).text
    assert "a larger global_batch or fewer GPUs" in first(idle_gpus(micro_batch=16)).text
    assert "a larger micro_batch, or compile" in first(idle_gpus(micro_batch=None)).text


def test_a_low_mfu_counts_like_idle_gpus_and_full_memory_leaves_no_choice() -> None:
    roomy = [a_gpu(index, memory=30 * GB) for index in range(4)]
    low = first(idle_gpus(gpus=roomy, mfu=0.1))
    assert low.evidence == "The model gets 10 % of the peak (MFU), and 20 % of the memory of the fullest is held."
    assert advise(idle_gpus(gpus=roomy, mfu=0.4)) == []
    assert advise(idle_gpus(gpus=[a_gpu(index, busy=0.4) for index in range(4)])) == []
    waiting = [text.text for text in advise(idle_gpus(ranks=all_ranks(input=0.2)))]
    assert len(waiting) == 1, "the GPUs are idle because of the input"
    assert "waits for its data" in waiting[0]


def test_a_gpu_that_is_nearly_full_is_a_risk() -> None:
    full = healthy(ranks=[*all_ranks()[:3], a_rank(3, memory=146 * GB)])
    advice = first(full)
    assert advice.text.startswith("The GPU of rank 3 (node1) is nearly full")
    assert advice.evidence == "Its tensors held 146 GB of 150 GB, 97 %."


# ---- The whole run


def failed(number: int, last_step: int | None, why: str) -> Any:
    begin = 1000.0 + 60 * number
    return an_attempt(number, begin=begin, end=begin + 50, state="failed", first_step=None if last_step is None else 1,
                      last_step=last_step, why=why)  # fmt: skip


def test_a_restart_loop_comes_before_everything_else() -> None:
    """Attempt 1 reaches step 30; 2, 3 and 4 fail alike, at other steps, and get no further."""
    why = "rank {} on node2 raised ValueError: bad label"
    loop = [failed(1, 30, why.format(0)), *(failed(number, 28, why.format(number)) for number in (2, 3, 4))]
    slow = {"ranks": ranks_but(2, input=9.0), "stragglers": [a_straggler(2, "input", 9.0, 0.004)]}
    advice = first(healthy(state="failed", attempts=loop, steps=30, **slow))
    assert advice.text == (
        "Attempts 1 to 4 failed alike and none got further than the first of them, so that restarting does not help: "
        "repair the cause before the next start (rank 4 on node2 raised ValueError: bad label)."
    )
    assert advice.evidence == (
        "4 attempts of 4: none got beyond step 30, and all after the first, 2 min 30 s, were for nothing."
    )
    assert advice.section == "events"


def test_two_attempts_are_a_loop_where_they_end_at_one_place() -> None:
    same = [failed(number, None, "rank 0 on node1 ran out of memory") for number in (1, 2)]
    assert "Attempts 1 and 2 failed alike" in first(healthy(state="failed", attempts=same)).text
    resumed = [failed(1, 30, "bad label"), failed(2, None, "bad label")]
    assert "none got beyond step 30" in first(healthy(state="failed", attempts=resumed)).evidence
    accident = [failed(1, 30, "killed by SIGKILL"), failed(2, 20, "killed by SIGKILL")]
    assert advise(healthy(state="failed", attempts=accident)) == []


def test_other_failures_are_no_loop() -> None:
    other = [failed(1, None, "out of memory"), failed(2, None, "the node went away")]
    assert advise(healthy(state="failed", attempts=other)) == []
    winning = [failed(number, 100 * number, "killed by SIGKILL") for number in (1, 2, 3)]
    assert advise(healthy(state="failed", attempts=winning)) == [], "each of them got further"


def test_a_loop_that_was_left_behind_counts_for_what_it_cost() -> None:
    loop = [failed(number, None, "no such file") for number in (1, 2, 3)]
    later = healthy(attempts=[*loop, an_attempt(4)], ranks=all_ranks(input=2.0))
    assert "waits for its data" in first(later).text
    assert "Attempts 1 to 3" in advise(later)[1].text


def repeated(**changes: Any) -> Summary:
    """Two failures in 3600 s, 600 s of it repeated; three checkpoints with stalls of 2 s."""
    attempts = [
        replace(failed(1, 100, "killed"), unsaved=250.0),
        replace(failed(2, 200, "killed"), unsaved=350.0),
        an_attempt(3),
    ]
    spent = TimeSpent(useful=2900, repeated=600, starting=94, checkpoints=6)
    return healthy(**{"attempts": attempts, "spent": spent, "checkpoints": 3, "checkpoint_stalls": 6.0, **changes})


def test_repeated_work_wants_checkpoints_as_often_as_daly_says() -> None:
    """sqrt(2 * 2 * 1800) = 84.85 s; of higher order: 84.85 * (1 + sqrt(1/1800)/3 + 1/1800/9) - 2 = 83.5 s."""
    advice = first(repeated())
    assert advice.text == 'Work is repeated after failures: save more often, as with save_every = "1 minute".'
    assert advice.evidence == (
        "10 min of 1 h (17 %) were steps done again, or to be done again, after 2 failures, with 3 checkpoints. "
        "A save stalls for 2 s and failures "
        "come every 30 min: the best interval is 1 min 24 s (Daly)."
    )
    assert advice.section == "checkpoints"


def test_repeated_work_without_any_checkpoint_or_with_plenty() -> None:
    nothing = first(repeated(checkpoints=0, checkpoint_stalls=0.0))
    assert "because nothing was saved: set save_every" in nothing.text
    assert "with no checkpoints" in nothing.evidence
    assert advise(repeated(checkpoints=40, checkpoint_stalls=80.0)) == [], "3500 s / 40: it saves that often already"
    assert advise(repeated(attempts=[an_attempt()])) == [], "nothing failed: steps were taken back"


def test_skipped_steps_are_no_work_that_a_failure_cost() -> None:
    """The same 600 s, and two failures exactly at a checkpoint."""
    attempts = [failed(1, 100, "killed"), failed(2, 200, "killed"), an_attempt(3)]
    assert advise(repeated(attempts=attempts)) == []


def test_work_that_a_killed_job_had_not_saved_is_repeated_too() -> None:
    killed = [an_attempt(1, state="stopped", unsaved=600.0), an_attempt(2, state="stopped")]
    advice = first(repeated(attempts=killed))
    assert advice.text.startswith("Work is repeated after interruptions: save more often")
    assert "done again, after 1 interruption, with 3 checkpoints. A save stalls for 2 s and interr" in advice.evidence
    nothing = first(repeated(attempts=killed, checkpoints=0, checkpoint_stalls=0.0))
    assert nothing.text.startswith("Work is repeated after every interruption, because nothing was saved")


def test_checkpoint_stalls_are_a_share_of_the_training() -> None:
    """10 stalls of 8 s are 80 of 480 s in training; at 800 s between two they are 1 %."""
    stalled = healthy(spent=replace(SPENT, checkpoints=80), checkpoints=10, checkpoint_stalls=80.0)
    advice = first(stalled)
    assert advice.text == (
        "The training stands still while it saves: save in the background (run.save() without wait=True), or less "
        'often, as with save_every = "13 minutes".'
    )
    assert advice.evidence == "10 checkpoints stalled it for 8 s each, 1 min 20 s in all: 16 % of the time in training."
    assert advice.section == "checkpoints"
    quick = healthy(spent=replace(SPENT, checkpoints=30), checkpoints=100, checkpoint_stalls=30.0)
    assert 'save_every = "75 steps"' in first(quick).text, "0.3 s each: after 30 s"
    assert advise(replace(stalled, checkpoints=1)) == [], "that of the end"


def test_long_starts_matter_in_long_runs() -> None:
    slow = healthy(spent=TimeSpent(useful=900, starting=300), attempts=[an_attempt(1), an_attempt(2)])
    advice = first(slow)
    assert "before the first step of an attempt" in advice.text
    assert advice.evidence == "2 attempts took 5 min to start, 25 % of 20 min."
    assert advise(healthy(spent=TimeSpent(useful=30, starting=60))) == [], "a minute of anything is mostly starting"


def test_standing_still_between_attempts() -> None:
    waits = {"spent": replace(SPENT, stopped=3560), "attempts": [an_attempt(1, job="7"), an_attempt(2, job="8")]}
    advice = first(healthy(**waits))
    assert advice.text.endswith("ask for more time in one job, so that it queues less often.")
    assert advice.evidence == "Nothing ran for 59 min 20 s of 1 h 7 min (89 %), between 2 attempts."


def test_validation_that_takes_long() -> None:
    advice = first(healthy(spent=replace(SPENT, validation=200)))
    assert advice.text.startswith("Validation takes a large part of the time: validate less often (validate_every)")
    assert advice.evidence == "3 min 20 s of 10 min 10 s in training, 33 %."


def test_skipped_steps_and_a_loss_that_is_not_finite() -> None:
    skipped = first(healthy(skipped_steps=50, alarms=50))
    assert "smaller optimizer.lr or a longer schedule.warmup_steps" in skipped.text
    assert skipped.evidence == "50 of 1000 steps (5 %) left the weights as they were, with 50 alarms."
    assert 'use precision = "bf16"' in first(healthy(skipped_steps=50, precision="fp16")).text
    assert advise(healthy(skipped_steps=2)) == []
    for skips in (0, 1, 50):
        lost = first(healthy(loss=None, diverged_step=998, skipped_steps=skips))
        assert "nothing is learnt any more" in lost.text
        assert lost.evidence == "The loss of step 998 is no finite number."
    unsaved = TimeSpent(repeated=400, starting=40)
    assert "nothing is learnt" in first(healthy(loss=None, diverged_step=998, spent=unsaved)).text


def test_padding_is_computed_for_nothing() -> None:
    advice = first(healthy(padding=26_214_400))
    assert "pack several texts into a row" in advice.text
    assert advice.evidence == "26.2 M of 65.5 M tokens are padding, 40 %."
    assert advice.section == "training"


# ---- All together


def test_the_three_that_win_most_come_in_that_order() -> None:
    """Of 400 s in steps 33 % are one rank's input (131 s), of 440 s a half is unused GPUs, a fifth of 320 s padding."""
    gpus = [*healthy().gpus, *(a_gpu(index, busy=0.0, memory=0, ranks=()) for index in range(4, 8))]
    many = healthy(
        gpus=gpus,
        ranks=ranks_but(2, input=0.2),
        stragglers=[a_straggler(2, "input", 0.2, 0.004)],
        padding=13_107_200,
        skipped_steps=50,
    )
    said = [advice.text.split(":")[0] for advice in advise(many)]
    assert said == [
        "GPUs 4, 5, 6, 7 of node1 (NVIDIA H200) are used by nobody",
        "Rank 2 (node1) waits for its data, and all others wait for it",
        "Much of what is computed only fills rows up",
    ]


def test_what_wins_less_than_a_second_or_a_hundredth_is_not_said() -> None:
    assert advise(healthy(skipped_steps=50, step_seconds=0.01)) == [], "half a second"


PLANTED: dict[str, Callable[[], Summary]] = {
    "restart_loop": lambda: healthy(state="failed", attempts=[failed(1, None, "x"), failed(2, None, "x")]),
    "repeated_work": repeated,
    "checkpoint_stalls": lambda: healthy(spent=replace(SPENT, checkpoints=80)),
    "long_start": lambda: healthy(spent=TimeSpent(useful=900, starting=300)),
    "stood_still": lambda: healthy(spent=replace(SPENT, stopped=3560)),
    "much_validation": lambda: healthy(spent=replace(SPENT, validation=200)),
    "lost_steps": lambda: healthy(skipped_steps=50),
    "much_padding": lambda: healthy(padding=26_214_400),
    "slow_input_of_a_rank": lambda: healthy(
        ranks=ranks_but(2, input=0.2), stragglers=[a_straggler(2, "input", 0.2, 0.004)]
    ),
    "slow_compute_of_a_rank": lambda: healthy(
        ranks=ranks_but(1, compute=0.56), stragglers=[a_straggler(1, "compute", 0.596, 0.356)]
    ),
    "all_wait_for_data": lambda: healthy(ranks=all_ranks(input=0.104)),
    "exposed_communication": lambda: healthy(ranks=all_ranks(wait=0.18)),
    "between_steps": lambda: healthy(ranks=all_ranks(between=0.108)),
    "unused_gpus": lambda: healthy(gpus=[*healthy().gpus, a_gpu(4, busy=0.0, memory=0, ranks=())]),
    "too_many_threads": lambda: healthy(hosts=[HostSummary("node1", 16, 0.98, 4)]),
    "full_precision": lambda: healthy(ranks=all_ranks(wait=0.004), precision="fp32"),
    "small_micro_batch": idle_gpus,
    "nearly_full": lambda: healthy(ranks=all_ranks(memory=146 * GB)),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_answers_its_own_problem_alone(rule: Callable[[Summary], object]) -> None:
    assert {name for name, problem in PLANTED.items() if rule(problem()) is not None} == {rule.__name__}
