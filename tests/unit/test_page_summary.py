"""A run in numbers, checked by hand: what headline and advice say rests on these."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from lockstep.page.advice.choose import advise
from lockstep.page.reading.reader import RunReader
from lockstep.page.reading.summary import Compared, Summary
from lockstep.page.sections.headline import headline
from lockstep.record.run_state import State
from tests.events import Event
from tests.runs import BEGIN, GB, Made, run_events, write_run

SOON = BEGIN + 100
LATER = BEGIN + 1e5
PLAIN = Made(steps=200, ranks=4)
RESTARTED = Made(steps=200, ranks=4, fails_after=(60,))


def summary_of(folder: Path, made: Made, now: float = LATER) -> Summary:
    reader = RunReader(write_run(folder, made))
    reader.read()
    return reader.summary(now)


def changed(folder: Path, made: Made, change: Callable[[list[Event]], list[Event]], now: float = LATER) -> Summary:
    lines = [json.dumps(event) + "\n" for event in change(list(run_events(made)))]
    (folder / "events.jsonl").write_text("".join(lines))
    reader = RunReader(folder)
    reader.read()
    return reader.summary(now)


def test_what_ran_where(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, hosts=2, layout="dp=2,fsdp=2"))
    assert (found.name, found.state, found.layout, found.world_size, found.nodes) == (
        "made",
        "finished",
        "dp=2,fsdp=2",
        4,
        2,
    )
    assert (found.device, found.precision, found.parameters, found.item) == ("cpu", "fp32", 812345, "tokens")
    assert (found.steps, found.total_steps, found.steps_per_epoch) == (200, 200, 120)
    assert (found.global_batch, found.micro_batch, found.saved_step) == (32, 8, 200)


def test_the_time_of_a_run_without_trouble(tmp_path: Path) -> None:
    """10 s to start; 200 steps of 0.1 s; 4 validations of 1 s and 4 stalls of 0.1 s: 34.4 s."""
    found = summary_of(tmp_path, PLAIN)
    spent = found.spent
    assert found.end - found.begin == pytest.approx(34.4)
    assert spent.whole == pytest.approx(34.4)
    assert spent.starting == pytest.approx(10)
    assert spent.useful == pytest.approx(200 * 0.07)
    assert spent.input == pytest.approx(200 * 0.005)
    assert spent.communication == pytest.approx(200 * 0.01)
    assert spent.optimizer == pytest.approx(200 * 0.01)
    assert spent.between == pytest.approx(200 * 0.005)
    assert spent.validation == pytest.approx(4)
    assert spent.checkpoints == pytest.approx(0.4)
    assert (spent.repeated, spent.stopped) == (0, 0)
    assert spent.other == pytest.approx(0, abs=1e-4)
    assert spent.goodput == pytest.approx(20 / 34.4)


def test_the_time_of_a_run_that_was_started_again(tmp_path: Path) -> None:
    """Steps 51 to 60 are done twice; 20 s lie between the attempts, and 0.5 s before the failure is told."""
    found = summary_of(tmp_path, RESTARTED)
    spent = found.spent
    assert spent.repeated == pytest.approx(10 * 0.1)
    assert spent.stopped == pytest.approx(20)
    assert spent.starting == pytest.approx(20)
    assert spent.useful + spent.input + spent.communication + spent.optimizer + spent.between == pytest.approx(20)
    assert spent.other == pytest.approx(0.5, abs=1e-3)
    assert spent.whole == pytest.approx(found.end - found.begin)
    assert spent.goodput == pytest.approx(20 / (34.4 + 1 + 20 + 10 + 0.5))


def test_skipped_steps_count_as_repeated_and_their_items_do_not_count(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, not_finite=(7, 8, 9), padding=100))
    assert found.skipped_steps == found.alarms == 3
    assert found.spent.repeated == pytest.approx(0.3)
    assert found.items == 197 * 32 * 64
    assert found.padding == 197 * 100
    assert found.trained == 197 * (32 * 64 - 100)


def test_what_was_lost_because_it_was_not_saved_is_told_of_every_attempt(tmp_path: Path) -> None:
    """Attempt 1 skips 7 and 55, fails at 60 and loses 51 to 60; 2 takes 71 to 80 back; 3 ends as it should."""

    def took_back(events: list[Event]) -> list[Event]:
        again = [one for one in events if one["attempt"] == 2 and one["kind"] == "step" and 70 < one["step"] <= 80]
        place = events.index(again[-1]) + 1
        return [*events[:place], *again, *events[place:]]

    made = Made(steps=200, fails_after=(60, 100), not_finite=(7, 55))
    found = changed(tmp_path, made, took_back)
    assert [one.unsaved for one in found.attempts] == pytest.approx([9 * 0.1, 0, 0])
    assert found.spent.repeated == pytest.approx((10 + 1 + 1 + 10) * 0.1), "51 to 60, 7, 55 again, 71 to 80"
    ended = summary_of(tmp_path, Made(steps=130, fails_after=(60,), ending="failed"))
    assert [one.unsaved for one in ended.attempts] == pytest.approx([10 * 0.1, 30 * 0.1])


def test_who_goes_back_to_an_older_checkpoint_has_lost_nothing(tmp_path: Path) -> None:
    """Attempt 1 saves at 150 and stops; --resume goes on from 50."""

    def stopped(events: list[Event]) -> list[Event]:
        save = {**ON_DISK, "attempt": 1, "step": 150, "seconds": 0.0, "stall": 0.0}
        return [
            {**save, "time": one["time"]} if one["kind"] == "failure" else one
            for one in events
            if one["attempt"] == 2 or one["kind"] != "stop"
        ]

    found = changed(tmp_path, Made(steps=200, fails_after=(150,), save_every=None), stopped)
    assert found.spent.repeated == pytest.approx(150 * 0.1)
    assert [one.unsaved for one in found.attempts] == [0, 0]


def test_items_of_steps_done_again_count_once(tmp_path: Path) -> None:
    assert summary_of(tmp_path, RESTARTED).items == 200 * 32 * 64


def delayed(events: list[Event], delay: Callable[[Event], float]) -> list[Event]:
    """Where some take longer: they and all that follow come as much later, and the steps among them say so."""
    late, told = 0.0, []
    for event in events:
        late += delay(event)
        told.append({**event, "time": event["time"] + late})
        if event["kind"] == "step":
            told[-1]["seconds"] += delay(event)
    return told


def compiled(events: list[Event], step: int = 1) -> list[Event]:
    """Every attempt that begins with this step compiles for a minute."""
    return delayed(events, lambda event: 60.0 if event["kind"] == "step" and event["step"] == step else 0.0)


def test_a_slow_first_step_is_part_of_the_start(tmp_path: Path) -> None:
    found = changed(tmp_path, PLAIN, compiled)
    assert found.spent.starting == pytest.approx(70)
    assert found.spent.useful == pytest.approx(14)
    assert found.step_seconds == pytest.approx(0.1)


def test_compiling_is_part_of_the_start_also_where_the_first_step_is_done_again(tmp_path: Path) -> None:
    """Nothing is saved before the failure at step 10: both attempts take 10 s and a minute until they train."""
    found = changed(tmp_path, Made(steps=20, fails_after=(10,), save_every=None, validate_every=None), compiled)
    spent = found.spent
    assert spent.starting == pytest.approx(2 * (10 + 60))
    assert spent.repeated == pytest.approx(10 * 0.1)
    assert spent.steps == pytest.approx(20 * 0.1)
    assert spent.whole == pytest.approx(found.end - found.begin)


def test_compiling_is_part_of_the_start_also_where_the_first_step_is_skipped(tmp_path: Path) -> None:
    """As with fp16, whose first loss scale is often too large."""
    found = changed(tmp_path, replace(PLAIN, not_finite=(1,)), compiled)
    assert found.spent.starting == pytest.approx(70)
    assert found.spent.repeated == pytest.approx(0.1)
    assert found.spent.whole == pytest.approx(found.end - found.begin)


SCORES: Event = {"epoch": 0.0, "loss": 3.0, "metrics": {}, "samples": 9, "best": True}
ON_DISK: Event = {"kind": "checkpoint", "path": "checkpoints/step", "bytes": 1, "best": True}


def test_validation_and_checkpoints_before_the_first_step_are_no_part_of_the_start(tmp_path: Path) -> None:
    """A validation of 50 s, a save of 4 s, and one of 3 s that is on disk, and told of, after the first step."""

    def validated(events: list[Event]) -> list[Event]:
        first = next(place for place, event in enumerate(events) if event["kind"] == "step")
        at = {"attempt": 1, "time": events[first]["time"] - 0.1, "step": 0}
        validation = {"kind": "validation", "seconds": 50.0, **SCORES, **at}
        saved = {**ON_DISK, **at, "seconds": 4.0, "stall": 4.0}
        later = {**ON_DISK, **at, "seconds": 3.1, "stall": 3.0, "time": events[first]["time"]}
        late = {id(validation): 50.0, id(saved): 4.0, id(events[first]): 3.0}
        told = [*events[:first], validation, saved, events[first], later, *events[first + 1 :]]
        found = delayed(told, lambda event: late.get(id(event), 0.0))
        found[first + 2]["seconds"] = 0.1  # the save was before it
        return found

    found, without = changed(tmp_path, PLAIN, validated), summary_of(tmp_path, PLAIN).spent
    assert found.spent.starting == pytest.approx(10)
    assert found.spent.validation == pytest.approx(without.validation + 50)
    assert found.spent.checkpoints == pytest.approx(without.checkpoints + 7)
    assert found.spent.whole == pytest.approx(found.end - found.begin) == pytest.approx(34.4 + 57)


def test_an_attempt_without_steps_starts_until_it_validates(tmp_path: Path) -> None:
    """Killed in its test after the last step, it goes on: 10 s to start, a validation of 100 s, a save of 20 s."""

    def tested_again(events: list[Event]) -> list[Event]:
        at, step = events[-1]["time"] + 30, {"attempt": 2, "step": 200}
        status = {"kind": "status", "attempt": 2, "text": "building the model", "time": at}
        validation = {"kind": "validation", "seconds": 100.0, **SCORES, **step, "time": at + 110}
        saved = {**ON_DISK, **step, "seconds": 20.0, "stall": 20.0, "time": at + 130}
        return [*events, status, validation, saved, {**events[-1], **step, "time": at + 130, "kind": "end"}]

    found, without = changed(tmp_path, PLAIN, tested_again), summary_of(tmp_path, PLAIN).spent
    assert found.spent.starting == pytest.approx(10 + 10)
    assert found.spent.validation == pytest.approx(without.validation + 100)
    assert found.spent.checkpoints == pytest.approx(without.checkpoints + 20)
    assert found.spent.whole == pytest.approx(found.end - found.begin) == pytest.approx(34.4 + 30 + 130)


def test_attempts_say_what_they_did_and_how_they_ended(tmp_path: Path) -> None:
    first, second = summary_of(tmp_path, RESTARTED).attempts
    assert (first.number, first.first_step, first.last_step, first.state) == (1, 1, 60, "failed")
    assert first.why == "rank 0 on node1 raised ValueError: something broke"
    assert (second.first_step, second.last_step, second.state, second.why) == (51, 200, "finished", "")
    assert second.begin - first.end == pytest.approx(20, abs=1e-3)


@pytest.mark.parametrize(
    ("ending", "now", "state"),
    [
        ("end", LATER, "finished"),
        ("stop", LATER, "stopped"),
        ("failed", LATER, "failed"),
        ("killed", SOON, "running"),
        ("killed", LATER, "lost"),
    ],
)
def test_the_state_of_a_run(tmp_path: Path, ending: str, now: float, state: State) -> None:
    found = summary_of(tmp_path, replace(PLAIN, ending=ending), now)
    assert (found.state, found.attempts[-1].state) == (state, state)


def test_a_failure_that_is_restarted_is_no_end_for_a_while(tmp_path: Path) -> None:
    def until_the_failure(events: list[Event]) -> list[Event]:
        return [event for event in events if event["attempt"] == 1]

    assert changed(tmp_path, RESTARTED, until_the_failure, SOON).state == "restarting"
    assert changed(tmp_path, RESTARTED, until_the_failure, LATER).state == "failed"


def test_an_attempt_that_said_nothing_was_lost_where_another_follows(tmp_path: Path) -> None:
    def silent(events: list[Event]) -> list[Event]:
        return [event for event in events if event["kind"] not in ("failure", "stop")]

    found = changed(tmp_path, RESTARTED, silent)
    assert found.attempts[0].state == "lost"
    assert found.attempts[0].why.startswith("no event tells how it ended")


def test_what_slurm_says_of_a_job_counts_where_the_run_says_nothing(tmp_path: Path) -> None:
    fields = {"restart": 0, "nodes": "node1", "partition": "gpu", "account": "a", "exit_code": "", "reason": ""}

    def in_a_job(events: list[Event]) -> list[Event]:
        job = {"kind": "job", "attempt": 1, "id": "4711", **fields}
        queued = {**job, "time": BEGIN - 100, "state": "PENDING"}
        over = {**job, "time": BEGIN + 9e4, "state": "TIMEOUT"}
        return [queued, {**job, "time": BEGIN - 1, "state": "RUNNING"}, *events, over]

    found = changed(tmp_path, replace(PLAIN, ending="killed"), in_a_job)
    assert (found.state, found.attempts[0].job) == ("stopped", "4711")
    assert found.spent.stopped == pytest.approx(100)
    assert found.end - found.begin == pytest.approx(134.4)


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED", "CANCELLED"])
def test_steps_that_a_killed_job_had_not_saved_do_not_count(state: str, tmp_path: Path) -> None:
    def killed(events: list[Event]) -> list[Event]:
        job = {"kind": "job", "attempt": 1, "id": "4711", "time": BEGIN + 9e4, "state": state}
        return [
            *events,
            {**job, "restart": 0, "nodes": "", "partition": "", "account": "", "exit_code": "", "reason": ""},
        ]

    nothing = changed(tmp_path, Made(steps=60, save_every=None, validate_every=None, ending="killed"), killed)
    assert (nothing.state, nothing.saved_step, nothing.spent.goodput) == ("stopped", None, 0)
    assert nothing.spent.repeated == pytest.approx(60 * 0.1)
    some = changed(tmp_path, Made(steps=60, ending="killed"), killed)
    assert some.spent.repeated == pytest.approx(10 * 0.1)
    assert some.spent.steps == pytest.approx(50 * 0.1)
    assert summary_of(tmp_path, replace(PLAIN, ending="stop")).spent.repeated == 0, "it has saved its last step"


def test_speed_is_that_of_the_median_step(tmp_path: Path) -> None:
    found = summary_of(tmp_path, PLAIN)
    assert found.step_seconds == pytest.approx(0.1)
    assert found.items_per_second == pytest.approx(32 * 64 / 0.1)


def test_mfu_is_the_work_of_the_model_over_what_all_devices_can_do(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, per_sample=5e9, peak=1e12))
    assert found.flops_per_second == pytest.approx(5e9 * 32 / 0.1)
    assert found.peak_flops == pytest.approx(4e12)
    assert found.mfu == pytest.approx(0.4)
    assert found.peak_source == "NVIDIA H200: data sheet, dense bf16"
    assert found.mfu_reason == ""


def test_an_mfu_above_one_is_an_error(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, per_sample=5e9, peak=3e11))
    assert found.mfu is None
    assert found.mfu_reason.startswith("an error: 133 % of the peak cannot be")


def test_a_run_that_failed_keeps_only_the_steps_it_had_saved(tmp_path: Path) -> None:
    def failed(events: list[Event], *, saved: bool) -> list[Event]:
        kept = [one for one in events if one["kind"] != "end" and (saved or one["kind"] != "checkpoint")]
        last = kept[-1]
        end = {"kind": "stop", "reason": "failed", "step": 200, "text": "it broke"}
        return [*kept, {**end, "time": last["time"], "attempt": last["attempt"]}]

    with_saves = changed(tmp_path, PLAIN, lambda events: failed(events, saved=True)).spent
    without = changed(tmp_path, PLAIN, lambda events: failed(events, saved=False)).spent
    assert with_saves.repeated == pytest.approx(0, abs=1e-6), "the last step is saved"
    assert without.steps == 0
    assert without.repeated == pytest.approx(200 * 0.1)


def test_a_loss_that_is_not_finite_and_stops_the_run_is_the_first_thing_to_change(tmp_path: Path) -> None:
    def stopped(events: list[Event]) -> list[Event]:
        kept = [one for one in events if one["kind"] != "end"]
        common = {"time": kept[-1]["time"], "attempt": kept[-1]["attempt"]}
        alarm = {"kind": "alarm", "what": "loss", "step": 201, "rank": 0, "sample_ids": [1], "loss": "NaN"}
        stop = {"kind": "stop", "reason": "failed", "step": 200, "text": "NonFiniteError"}
        return [*kept, {**alarm, "action": "stop", "text": "not finite", **common}, {**stop, **common}]

    first = advise(changed(tmp_path, PLAIN, stopped))[0]
    assert "a loss that is not finite" in first.text
    assert first.evidence == "The loss of step 201 is no finite number."


def with_nan_from(events: list[Event], first: int) -> list[Event]:
    """Losses that are no numbers, and nobody skips these steps."""
    return [{**one, "loss": "NaN"} if one["kind"] == "step" and one["step"] >= first else one for one in events]


def test_an_early_overflow_does_not_hide_that_nothing_is_learnt_any_more(tmp_path: Path) -> None:
    made = replace(PLAIN, not_finite=(5,))
    lost = changed(tmp_path, made, lambda events: with_nan_from(events, 20))
    assert lost.diverged_step == 200
    assert "nothing is learnt any more" in advise(lost)[0].text
    assert advise(lost)[0].evidence == "The loss of step 200 is no finite number."
    assert summary_of(tmp_path, made).diverged_step is None


def test_a_last_step_that_was_skipped_says_nothing_about_the_weights(tmp_path: Path) -> None:
    made = replace(PLAIN, not_finite=range(190, 201))
    assert summary_of(tmp_path, made).diverged_step is None
    assert changed(tmp_path, made, lambda events: with_nan_from(events, 189)).diverged_step == 189


def test_without_a_peak_there_is_no_mfu_and_a_reason(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, peak=None))
    assert (found.mfu, found.peak_flops) == (None, None)
    assert found.flops_per_second == pytest.approx(3.2e11)
    assert found.mfu_reason == "nobody has measured what this device can do"


def test_cost_in_device_hours_and_energy(tmp_path: Path) -> None:
    """4 ranks for 24.4 s less what came after the last report; two of four GPUs at work: 100 + 600 + 120 W."""
    made = replace(PLAIN, ranks=2, gpus=4, validate_every=None, save_every=None)
    found = summary_of(tmp_path, made)
    assert found.device_hours == pytest.approx(2 * 30 / 3600)
    assert found.kwh == pytest.approx(820 * 30 / 3.6e6)
    assert found.kwh_reason == ""


def test_ranks_that_share_a_gpu_cost_one(tmp_path: Path) -> None:
    """4 ranks on one GPU for 34.4 s. Of ranks of which nobody tells where they are, each has its own."""

    def told(users: list[int]) -> Callable[[list[Event]], list[Event]]:
        def change(events: list[Event]) -> list[Event]:
            for event in events:
                if event["kind"] == "machine":
                    event["hosts"][0]["gpus"][0]["ranks"] = users
            return events

        return change

    made = replace(PLAIN, gpus=1)
    assert changed(tmp_path, made, told([0, 1, 2, 3])).device_hours == pytest.approx(34.4 / 3600)
    assert changed(tmp_path, made, told([0, 1])).device_hours == pytest.approx(3 * 34.4 / 3600)
    assert changed(tmp_path, made, told([])).device_hours == pytest.approx(4 * 34.4 / 3600)


def test_energy_of_attempts_adds_up(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(RESTARTED, validate_every=None, stall=0.0))
    assert found.kwh == pytest.approx(100 * ((10 + 6.0) + (10 + 15.0)) / 3.6e6, rel=1e-4)


def test_energy_that_nobody_measures_is_not_known(tmp_path: Path) -> None:
    assert summary_of(tmp_path, replace(PLAIN, joules=False)).kwh is None
    found = summary_of(tmp_path, replace(PLAIN, joules=False))
    assert found.kwh_reason == "nobody measures the power of these hosts"
    assert summary_of(tmp_path, replace(PLAIN, tells_machine=False)).kwh_reason == (
        "no event tells what the hosts used up"
    )


def test_energy_says_whom_it_leaves_out(tmp_path: Path) -> None:
    def without_node2(events: list[Event]) -> list[Event]:
        for event in events:
            if event["kind"] == "machine":
                event["hosts"][1]["joules"] = None
        return events

    found = changed(tmp_path, replace(PLAIN, hosts=2), without_node2)
    assert found.kwh is not None
    assert found.kwh_reason == "without node2, whose power nobody measures"


def without_watts_of(*hosts: str) -> Callable[[list[Event]], list[Event]]:
    """The counters of these hosts' CPUs may be read by root alone: `joules` are those of their GPUs."""

    def change(events: list[Event]) -> list[Event]:
        for event in events:
            for host in event.get("hosts", ()) if event["kind"] == "machine" else ():
                host["watts"] = None if host["host"] in hosts else host["watts"]
        return events

    return change


def test_energy_of_gpus_alone_is_told_as_such(tmp_path: Path) -> None:
    made = replace(PLAIN, hosts=2, gpus=2)
    both = changed(tmp_path, made, without_watts_of())
    assert (both.kwh_without_cpus, both.kwh_reason) == (False, "")
    none = changed(tmp_path, made, without_watts_of("node1", "node2"))
    assert none.kwh == both.kwh
    assert (none.kwh_without_cpus, none.kwh_reason) == (True, "")
    one = changed(tmp_path, made, without_watts_of("node2"))
    assert (one.kwh_without_cpus, one.kwh_reason) == (False, "without the CPUs of node2, whose power nobody measures")


def test_gpus_beside_a_run_on_cpus_are_idle_and_no_part_of_its_numbers(tmp_path: Path) -> None:
    """4 processes for 34.4 s. Where nobody measures the CPUs, what two idle GPUs used up is not the run's energy."""

    def on_cpus(events: list[Event]) -> list[Event]:
        for event in events:
            if event["kind"] == "start":
                event["device"] = "cpu"
            for host in event["hosts"] if event["kind"] == "machine" else ():
                for gpu in host["gpus"]:
                    gpu.update(ranks=[], busy=0.0, memory=0)
        return events

    made = replace(PLAIN, gpus=2)
    found = changed(tmp_path, made, on_cpus)
    told = headline(found)
    assert told.subtitle.startswith("4 CPU processes of 1 node")
    facts = {fact.label: f"{fact.value}; {fact.note}" for fact in told.facts}
    assert [label for label, text in facts.items() if "GPU" in text] == ["Energy"], "which the whole node used up"
    assert facts["Cost"].startswith("2.29 process-minutes")
    assert found.mfu == summary_of(tmp_path, replace(PLAIN, gpus=0)).mfu
    assert "leave --device cpu out" in advise(found)[0].text
    unread = changed(tmp_path, made, lambda events: without_watts_of("node1")(on_cpus(events)))
    assert (unread.kwh, unread.kwh_reason) == (None, "nobody measures the power of these hosts")


def test_losses(tmp_path: Path) -> None:
    found = summary_of(tmp_path, PLAIN)
    assert found.loss == pytest.approx(PLAIN.loss(200))
    assert found.best_step == 200
    assert found.best_loss == pytest.approx(PLAIN.loss(200) + 0.1)
    assert found.test_loss is None
    odd = summary_of(tmp_path, replace(PLAIN, not_finite=range(1, 201)))
    assert (odd.loss, odd.best_loss, odd.best_step) == (None, None, None)
    assert odd.items == 0


def test_the_best_validation_of_steps_that_were_taken_back_does_not_count(tmp_path: Path) -> None:
    def better(events: list[Event]) -> list[Event]:
        for event in events:
            if event["kind"] == "validation" and event["attempt"] == 1:
                event["loss"] = 0.01
        return events

    made = replace(RESTARTED, fails_after=(110,), save_every=60, steps=150)
    assert changed(tmp_path, made, better).best_step == 50
    lost = replace(RESTARTED, fails_after=(110,), save_every=None, steps=150)
    assert changed(tmp_path, lost, better).best_step == 150


def test_ranks_hosts_and_gpus_also_unused_ones(tmp_path: Path) -> None:
    made = replace(PLAIN, ranks=2, gpus=3, threads=16, workers=2, slow_compute={1: 0.05})
    found = summary_of(tmp_path, made)
    first, second = found.ranks
    assert (first.rank, first.host, first.threads, first.workers) == (0, "node1", 16, 2)
    assert (first.input, first.compute, first.optimizer, first.between, first.wait) == pytest.approx(
        (0.005, 0.07, 0.01, 0.005, 0.06)
    )
    assert (second.compute, second.wait) == pytest.approx((0.12, 0.01))
    assert (first.memory, second.memory, found.memory) == (GB, GB + 1000, GB + 1000)
    assert first.cores == pytest.approx(1)
    (host,) = found.hosts
    assert (host.host, host.cores, host.ranks) == ("node1", 16, 2)
    assert host.cpu == pytest.approx(2 / 16)
    assert [gpu.ranks for gpu in found.gpus] == [(0,), (1,), ()]
    unused = found.gpus[2]
    assert (unused.index, unused.busy, unused.memory, unused.watts) == (2, 0, GB // 2, 60)
    assert found.gpus[0].busy == pytest.approx(0.9)
    assert found.gpus[0].memory_total == 150 * GB


def test_predicted_and_measured(tmp_path: Path) -> None:
    found = summary_of(tmp_path, replace(PLAIN, predicted_step=0.12))
    assert found.predicted_step is not None
    assert astuple(found.predicted_step) == pytest.approx((0.12, 0.1, 0.2))
    assert found.predicted_memory == Compared(GB, None, None)
    running = summary_of(tmp_path, replace(PLAIN, predicted_step=0.08, ending="killed"))
    assert running.predicted_step is not None
    assert astuple(running.predicted_step) == pytest.approx((0.08, 0.1, -0.2))
    assert summary_of(tmp_path, replace(PLAIN, predicted_step=None)).predicted_step is None


def test_the_memory_of_gpus_is_compared_as_soon_as_the_ranks_tell_it(tmp_path: Path) -> None:
    """1 GB was predicted, and the fullest of four ranks holds 3000 bytes more. On CPUs nobody measures tensors."""
    made = replace(PLAIN, gpus=4, ending="killed")
    running = summary_of(tmp_path, made).predicted_memory
    assert running is not None
    assert astuple(running) == pytest.approx((GB, GB + 3000, GB / (GB + 3000) - 1))
    assert summary_of(tmp_path, replace(made, gpus=0)).predicted_memory == Compared(GB, None, None)


PROFILED = replace(PLAIN, ranks=2, profile=(50, 52), profile_slows=0.2, profile_writes=10.0)


def test_a_profile_is_accounted_for_and_does_not_count_in_medians(tmp_path: Path) -> None:
    """Three steps take 0.2 s longer, and 10 s pass until both ranks have told what they recorded."""
    found, without = summary_of(tmp_path, PROFILED), summary_of(tmp_path, replace(PROFILED, profile=None))
    assert found.spent.profiling == pytest.approx(10.6)
    assert without.spent.profiling == 0
    assert found.spent.steps == pytest.approx(without.spent.steps)
    assert found.spent.other == pytest.approx(without.spent.other)
    assert found.step_seconds == pytest.approx(0.1)


def test_medians_leave_profiled_steps_out_also_where_these_are_most(tmp_path: Path) -> None:
    """Of 20 steps 16 are profiled; on GPUs also the one before, for which the profiler is switched on."""
    most = replace(PROFILED, steps=20, profile=(5, 20))
    assert summary_of(tmp_path, most).step_seconds == pytest.approx(0.1)
    assert summary_of(tmp_path, most).items_per_second == pytest.approx(32 * 64 / 0.1)
    all_of_it = replace(most, profile=(1, 20))
    assert summary_of(tmp_path, all_of_it).step_seconds == pytest.approx(0.3), "there is nothing else"

    def slow_before(events: list[Event]) -> list[Event]:
        for event in events:
            if event["kind"] == "step" and event["step"] == 4:
                event["seconds"] = 9.0
        return events

    assert changed(tmp_path, replace(most, steps=5, profile=(5, 5), gpus=2), slow_before).step_seconds == (
        pytest.approx(0.1)
    )


def test_medians_are_of_the_last_attempt_also_where_all_of_it_was_profiled(tmp_path: Path) -> None:
    """Attempt 2 does steps 51 to 60, all of them profiled: 0.3 s each, where those of attempt 1 took 0.1 s."""
    found = summary_of(tmp_path, replace(PROFILED, steps=60, fails_after=(50,), profile=(51, 60)))
    assert found.step_seconds == pytest.approx(0.3)
    assert found.items_per_second == pytest.approx(32 * 64 / 0.3)
    assert found.mfu == pytest.approx(1e9 * 32 / 0.3 / 2e12)
    assert found.is_profiled
    assert not summary_of(tmp_path, PROFILED).is_profiled


def test_samples_that_the_model_writes_are_part_of_validation(tmp_path: Path) -> None:
    """Four of them, 0.5 s each, beside four validations of 1 s."""

    def slow_samples(events: list[Event]) -> list[Event]:
        late = 0.0
        told: list[Event] = []
        for event in events:
            if event["kind"] == "sample":
                told.append({"time": event["time"] + late, "kind": "status", "attempt": 1, "text": "generating"})
                late += 0.5
            told.append({**event, "time": event["time"] + late})
        return told

    found = changed(tmp_path, replace(PLAIN, samples=True), slow_samples)
    assert found.spent.validation == pytest.approx(6)
    assert found.spent.other == pytest.approx(summary_of(tmp_path, PLAIN).spent.other)


def test_checkpoints_stragglers_and_warnings_are_counted(tmp_path: Path) -> None:
    def told(events: list[Event]) -> list[Event]:
        at = {"time": BEGIN + 15, "attempt": 1}
        slow = {"kind": "straggler", "step": 9, "rank": 1, "host": "node1", "cause": "compute", "others": 0.1, **at}
        warning = {"kind": "message", "level": "warning", "text": "careful", **at}
        more = [{**slow, "seconds": 0.2, "text": "one"}, {**slow, "seconds": 0.3, "text": "two"}, warning]
        return [*events[:40], *more, {**warning, "level": "info"}, *events[40:]]

    found = changed(tmp_path, PLAIN, told)
    (slow,) = found.stragglers
    assert (slow.rank, slow.cause, slow.seconds, slow.others, slow.text, slow.times) == (
        1,
        "compute",
        0.3,
        0.1,
        "two",
        2,
    )
    assert (found.checkpoints, found.checkpoint_bytes, found.warnings) == (4, 9812345, 1)
    assert found.checkpoint_stalls == pytest.approx(0.4)


def test_one_step_is_enough_for_all_numbers(tmp_path: Path) -> None:
    found = summary_of(tmp_path, Made(steps=1, ranks=1, validate_every=None, save_every=None))
    assert (found.steps, found.layout) == (1, "single")
    assert found.step_seconds == pytest.approx(0.1)
    assert found.spent.whole == pytest.approx(10.1)
    assert not math.isnan(found.spent.goodput or math.nan)


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    found = summary_of(tmp_path, Made(steps=0, ending="failed"))
    assert (found.state, found.steps, found.step_seconds, found.mfu, found.loss) == ("failed", 0, None, None, None)
    assert found.spent.starting == pytest.approx(10.5)
    assert found.spent.goodput == 0
