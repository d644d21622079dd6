"""The top of a page: one sentence that is true, and numbers that say what they mean or why they are missing."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from typing import Any

import pytest

from lockstep.page.advice.choose import advise
from lockstep.page.panels import Fact
from lockstep.page.reading.summary import Compared, Summary, TimeSpent
from lockstep.page.sections.comparison import compare_runs
from lockstep.page.sections.headline import UNKNOWN, headline, seconds_left
from lockstep.text.units import count_text, device_time_text, duration_text, energy_text
from tests.summaries import GB, SPENT, a_gpu, a_rank, an_attempt, healthy


def fact(label: str, **changes: Any) -> Fact:
    (found,) = [one for one in headline(healthy(**changes)).facts if one.label == label]
    return found


def verdict(state: str, **changes: Any) -> str:
    return headline(healthy(state=state, **changes)).verdict


def test_what_ran_where() -> None:
    told = headline(healthy())
    assert told.title == "lm"
    assert told.subtitle == "4 GPUs (NVIDIA H200) of 1 node, layout dp=4, 812 k parameters, bf16"
    cpus = headline(healthy(device="cpu", world_size=1, nodes=2, layout="single", precision="fp32"))
    assert cpus.subtitle == "1 CPU process of 2 nodes, layout single, 812 k parameters, fp32"
    shared = headline(healthy(gpus=[a_gpu(0, ranks=(0, 1, 2, 3))]))
    assert shared.subtitle.startswith("4 ranks that share 1 GPU (NVIDIA H200) of 1 node")
    partly_told = headline(healthy(gpus=[a_gpu(0), a_gpu(1)]))
    assert partly_told.subtitle.startswith("4 GPUs (NVIDIA H200)"), "one host said nothing"


# ---- The verdict


def test_a_run_that_finished() -> None:
    assert verdict("finished") == "Finished 1000 steps in 7 min 20 s, with a loss of 1.847."
    again = verdict("finished", attempts=[an_attempt(1), an_attempt(2)], loss=None)
    assert again == "Finished 1000 steps in 7 min 20 s in 2 attempts, with a loss that is no finite number."


def test_a_run_that_goes_on_says_how_long_with_saving_and_validation_as_so_far() -> None:
    """600 steps of 0.4 s are 240 s, and 14 s beside every 400 s of steps make it 248.4 s."""
    running = healthy(state="running", steps=400)
    assert seconds_left(running) == pytest.approx(248.4)
    assert headline(running).verdict == "Running: step 400 of 1000, about 4 min 8 s left."
    assert verdict("running", steps=400, total_steps=None) == "Running: step 400."
    assert verdict("starting", steps=0) == "Starting: no step is done yet."


def test_a_run_that_failed_says_why_and_where_it_can_go_on() -> None:
    ended = [an_attempt(state="failed", why="rank 1 on node2 was killed by SIGKILL")]
    assert verdict("failed", attempts=ended, steps=120, saved_step=100) == (
        "Failed at step 120 of 1000: rank 1 on node2 was killed by SIGKILL; the same command goes on from the "
        "checkpoint of step 100."
    )
    assert verdict("failed", attempts=ended, steps=0, saved_step=None) == (
        "Failed at the start: rank 1 on node2 was killed by SIGKILL; nothing was saved, so that the same command "
        "begins anew."
    )


def test_a_run_that_was_stopped_or_lost() -> None:
    stopped = [an_attempt(state="stopped", why="checkpoint saved; the same command goes on")]
    assert verdict("stopped", attempts=stopped, steps=120) == (
        "Stopped at step 120 of 1000: checkpoint saved; the same command goes on."
    )
    assert verdict("lost", steps=120, saved_step=100) == (
        "Lost at step 120 of 1000: its last word came after 7 min 20 s and nothing says how it ended; the same "
        "command goes on from the checkpoint of step 100."
    )


# ---- The facts


def test_goodput_is_steps_that_were_kept_over_all_time() -> None:
    """400 of 440 s; with 1560 s in a queue 400 of 2000 s."""
    assert (fact("Goodput").value, fact("Goodput").level) == ("90.9 %", "good")
    assert "steps whose result was kept" in fact("Goodput").note
    queued = fact("Goodput", spent=replace(SPENT, stopped=1560))
    assert (queued.value, queued.level) == ("20 %", "warning")
    assert fact("Goodput", spent=TimeSpent(useful=10, starting=30)).level == "info", "a short run is mostly starting"
    assert fact("Goodput", spent=TimeSpent()) == Fact("Goodput", UNKNOWN, "no time has passed yet")


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        ("Goodput", {"spent": replace(SPENT, other=-100)}),
        ("Memory", {"memory": 160 * GB, "ranks": [a_rank(0, memory=160 * GB)]}),
    ],
)
def test_more_than_a_hundred_per_cent_is_an_error(label: str, changes: dict[str, Any]) -> None:
    found = fact(label, **changes)
    assert found.level == "error"
    assert found.note.startswith("more than")


def test_an_mfu_over_a_hundred_per_cent_is_no_number_but_an_error_with_its_fix() -> None:
    wrong = "an error: 132 % of the peak cannot be, so that the peak is too low (lockstep bench): run it again"
    found = fact("MFU", mfu=None, flops_per_second=5e15, mfu_reason=wrong)
    assert found == Fact("MFU", UNKNOWN, wrong, "error")


def test_a_report_of_a_running_run_says_when_it_was_written() -> None:
    running = healthy(state="running", steps=69, total_steps=100, step_seconds=0.01)
    written = datetime(2026, 11, 16, 9, 5).timestamp()
    told = headline(running, written).verdict
    assert told == "Running when this was written (09:05, 16 Nov 2026): step 69 of 100, about 1 s left."
    assert headline(running).verdict == "Running: step 69 of 100, about 1 s left."
    assert headline(replace(running, steps=100)).verdict == "Running: step 100 of 100."


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (0.275, "2.5 times the predicted 109 ms"),
        (0.145, "33 % more than the predicted 109 ms"),
        (0.1, "8 % less than the predicted 109 ms"),
        (0.109, "equal to the predicted 109 ms"),
        (0.0109, "0.1 times the predicted 109 ms"),
    ],
)
def test_a_prediction_cannot_be_read_the_wrong_way_round(measured: float, text: str) -> None:
    assert fact("Step time", step_seconds=measured, predicted_step=Compared(0.109, measured, 0.0)).note.endswith(text)


def test_mfu_says_what_it_is_and_of_which_peak() -> None:
    assert fact("MFU").value == "40 %"
    assert fact("MFU").note == (
        "model FLOPs per second over the stated peak; recomputation not counted: 1.6 PFLOP/s of 4 PFLOP/s (data "
        "sheet, dense bf16)"
    )
    assert fact("MFU", mfu=None, peak_flops=None, mfu_reason="no peak is known of a CPU") == Fact(
        "MFU", UNKNOWN, "no peak is known of a CPU"
    )


def test_time_cost_and_energy() -> None:
    assert fact("Wall time").value == "7 min 20 s"
    assert "of which 1 h between attempts" in fact("Wall time", spent=replace(SPENT, stopped=3600)).note
    assert fact("Cost").value == "0.489 GPU-hours", "4 x 440 s"
    assert fact("Cost", device="cpu", device_hours=2.5).value == "2.5 process-hours"
    unused = fact("Cost", gpus=[*healthy().gpus, a_gpu(4, ranks=())])
    assert "1 GPU of the nodes that no rank uses is not in it" in unused.note
    assert fact("Energy").value == "0.3 kWh"
    assert fact("Energy").note.endswith("without the rest of the nodes and their cooling; without node2")
    assert fact("Energy").note.startswith("CPUs and GPUs, as they count it themselves; ")
    assert fact("Energy", kwh_without_cpus=True).note.startswith("GPUs alone, as they count it themselves; ")
    assert fact("Energy", kwh=None, kwh_reason="") == Fact("Energy", UNKNOWN, "nobody measured it")


def test_tokens_real_padded_and_trained_are_apart() -> None:
    assert fact("Tokens").value == "64.9 M real", "65.536 M less 0.655 M"
    assert fact("Tokens").note == "655 k more were padding; 64.9 M were trained on: the weight of the losses"
    assert fact("Samples", item="samples", padding=0).note.startswith("none were padding")
    assert fact("Throughput").value == "164 k tokens/s"
    assert fact("Throughput", items_per_second=None).value == UNKNOWN


def test_losses() -> None:
    assert (fact("Loss").value, fact("Best validation").value) == ("1.847", "1.9")
    assert fact("Best validation").note == "loss after step 900"
    assert fact("Test", test_loss=4.605).value == "4.605"
    assert fact("Loss", loss=float("nan")).level == "error"
    assert fact("Loss", loss=None).value == "not finite"
    assert fact("Loss", loss=None, steps=0).value == UNKNOWN
    assert fact("Best validation", best_loss=None).note == "nothing was validated"


def test_predicted_against_measured() -> None:
    assert fact("Step time").value == "400 ms"
    assert fact("Step time").note.endswith("9 % less than the predicted 440 ms")
    assert (
        fact("Predicted memory").note
        == "of tensors, on the fullest rank; measured 80 GB, 3 % more than the predicted amount"
    )
    off = fact("Step time", predicted_step=Compared(0.8, 0.4, 1.0))
    assert (off.level, off.value) == ("warning", "400 ms")
    assert fact("Step time", predicted_step=None).note.endswith("nothing was predicted")
    assert fact("Step time", predicted_step=Compared(0.2, None, None)).note.endswith("2 times the predicted 200 ms")
    assert fact("Step time", predicted_step=None, step_seconds=None).value == UNKNOWN
    assert fact("Predicted memory", predicted_memory=Compared(GB, None, None)).note.endswith("not measured")
    assert fact("Predicted memory", predicted_memory=None).value == UNKNOWN
    assert fact("Memory").note == "GPU memory, of the rank that held most: 53 % of 150 GB"
    assert fact("Memory", memory=None).value == UNKNOWN


def test_memory_is_a_share_of_the_gpu_that_held_it_and_not_of_one_of_another_attempt() -> None:
    """120 GB on an H200; then the job went on with 70 GB on an A100 of 80 GB."""
    smaller = [a_gpu(index, memory_total=80 * GB) for index in range(4)]
    found = fact("Memory", memory=120 * GB, gpus=smaller, ranks=[a_rank(rank, memory=70 * GB) for rank in range(4)])
    assert (found.value, found.level) == ("120 GB", "info")
    assert found.note == ("GPU memory, of the rank that held most; the fullest GPU of the last attempt: 88 % of 80 GB")
    mixed = [a_gpu(0), a_gpu(1, memory_total=80 * GB)]
    both = [a_rank(0, memory=120 * GB), a_rank(1, memory=70 * GB)]
    assert "more than" not in fact("Memory", memory=120 * GB, gpus=mixed, ranks=both).note


def test_a_reader_finds_every_number_at_its_place_also_in_a_run_that_has_just_begun() -> None:
    begun = Summary(
        name="lm", state="running", layout="single", world_size=1, nodes=1, device="cpu", precision="fp32",
        parameters=0, item="samples", steps=0, total_steps=None, begin=0.0, end=0.0, attempts=[], spent=TimeSpent(),
    )  # fmt: skip
    labels = [one.label for one in headline(healthy(device="cpu", item="samples")).facts]
    told = headline(begun)
    assert [one.label for one in told.facts] == labels
    assert all(one.note for one in told.facts if one.value == UNKNOWN), "a dash says why"


@pytest.mark.parametrize("field", [field.name for field in fields(Summary) if field.type not in ("str", "State")])
@pytest.mark.parametrize("problem", ["none", "loop"])
def test_a_log_of_which_a_part_is_gone_still_has_words(field: str, problem: str) -> None:
    """Every number 0, every list empty, in turn."""
    failed = [an_attempt(number, state="failed", why="x") for number in (1, 2)]
    whole = healthy(state="failed", attempts=failed) if problem == "loop" else healthy()
    usual = getattr(whole, field)
    kinds: dict[type, Any] = {list: [], TimeSpent: TimeSpent(), Compared: None}
    gone: dict[str, Any] = {field: kinds.get(type(usual), 0)}
    broken = replace(whole, **gone)
    assert len(headline(broken).facts) >= 12
    assert len(advise(broken)) <= 3
    assert len(compare_runs([broken, whole, broken])) == 1


def test_a_log_without_a_start_says_so() -> None:
    assert headline(healthy(world_size=0)).subtitle == "the log does not say where it ran"


def test_a_median_that_leaves_profiled_steps_out_says_so() -> None:
    told = fact("Step time", spent=replace(SPENT, profiling=3)).note
    one = fact("Step time", attempts=[an_attempt(first_step=7, last_step=7)]).note
    assert one.startswith("the only step of the last attempt, with its warm-up")
    all_of_it = fact("Step time", spent=replace(SPENT, profiling=3), is_profiled=True).note
    assert all_of_it.startswith("the median of the last attempt, all of whose steps a profiler slowed down;")
    assert told.startswith("the median of the last attempt, warm-up and profiled steps left out")


@pytest.mark.parametrize(
    ("hours", "device", "text"),
    [
        (0, "cpu", "0 process-seconds"), (0.00613, "cpu", "22 process-seconds"), (0.0224, "H200", "81 GPU-seconds"),
        (0.05, "H200", "3 GPU-minutes"), (0.489, "H200", "0.489 GPU-hours"), (32_123.4, "H200", "32,123 GPU-hours"),
    ],
)  # fmt: skip
def test_what_a_run_cost_is_readable_also_where_it_was_short(hours: float, device: str, text: str) -> None:
    assert device_time_text(hours, device) == text


def test_little_energy_is_told_in_watt_hours() -> None:
    assert [energy_text(kwh) for kwh in (0.00276, 0.3, 12_345.6)] == ["2.76 Wh", "0.3 kWh", "12,346 kWh"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.25, "250 ms"), (41, "41 s"), (59.7, "1 min"), (125, "2 min 5 s"), (3599.6, "1 h"),
        (12_000, "3 h 20 min"), (86_399, "1 d"), (187_200, "2 d 4 h"),
    ],
)  # fmt: skip
def test_times_are_told_in_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_large_numbers_are_told_in_three_digits() -> None:
    assert [count_text(n) for n in (0, 812, 999_900, 7.24e9, 4e15)] == ["0", "812", "1 M", "7.24 G", "4 P"]
