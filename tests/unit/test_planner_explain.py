"""The course's arithmetic and ZeRO's table come out as they were printed, and an estimate adds up on paper."""

from __future__ import annotations

import re

import pytest

from lockstep.layout import Layout
from lockstep.links.collective_cost import Link
from lockstep.planner.cost.job import Job
from lockstep.planner.cost.memory import estimate_memory
from lockstep.planner.machine.hardware import GpuKind, Machine
from lockstep.planner.model.find_model import find_model
from lockstep.planner.show.terms import course_text, explain_text, gpt2_rows, model_rows, zero_rows


def test_zero_table_is_the_papers() -> None:
    assert [f"{total:.1f}" for _, _, total in zero_rows()] == ["120.0", "31.4", "16.6", "1.9"]


def test_the_courses_models_are_16_bytes_a_parameter() -> None:
    assert [total for _, _, total in model_rows()] == pytest.approx([5.12, 24, 275.2, 2800])


def test_the_courses_gpt2_adds_up_to_87() -> None:
    rows = {row.term: row for row in gpt2_rows()}
    assert [rows[term].course_gb for term in ("parameters", "gradients", "Adam")] == [6, 6, 18]
    activations = rows["embeddings"].course_gb + rows["activations of blocks"].course_gb
    assert activations == pytest.approx(56.43, abs=0.03)
    assert round(sum(row.course_gb for row in rows.values()) + 0.5) == 87


def test_ours_counts_what_the_course_leaves_out() -> None:
    rows = {row.term: row for row in gpt2_rows()}
    assert rows["Adam"].ours_gb == pytest.approx(2 * rows["parameters"].ours_gb)
    assert rows["attention scores"].ours_gb == pytest.approx(48 * 32 * 25 * 1024**2 * 4 / 1e9)
    assert rows["activations of blocks"].ours_gb == pytest.approx(48 * 32 * 1024 * 16 * 1600 * 4 / 1e9, rel=0.01)
    text = course_text()
    for number in ("120.0", "31.4", "16.6", "1.9", "275.2", "86.4"):
        assert number in text


def test_the_terms_of_a_job_add_up_to_its_sum() -> None:
    gpu = GpuKind("A100-SXM-80", {"bf16": 312.0}, 0.87, 80.0, 2039.0, 108, 400.0, 50.0, "data sheet")
    machine = Machine("one node", gpu, 8, 1, Link(1e-5, 1e-11), Link(1e-5, 1e-10))
    job = Job(find_model("gpt2-xl", 1024, {"dropout": False}), machine, Layout(pp=2, fsdp=4), 64, 4)
    text = explain_text(job)
    for memory, part in zip(estimate_memory(job), text.split("pipeline rank")[1:], strict=True):
        *terms, total, _ = (float(number) for number in re.findall(r"(-?[\d.]+) GB  ", part))
        assert sum(terms) == pytest.approx(total, abs=0.01)
        assert total == pytest.approx(memory.total / 1e9, abs=0.001)
