"""The panels of a page in a real browser: what they draw, and how they obey the mouse and the keyboard."""

from __future__ import annotations

import re

import pytest

from lockstep.page.panels import Curve, Heat, HeatLayer, Lines, Share, Shares, Stacked, Table
from tests.browser import example
from tests.browser.conftest import OpenPage
from tests.browser.looking import drag, ink_of, panel, with_panels
from tests.patience import wait_for

pytestmark = pytest.mark.browser


def test_a_name_in_the_legend_hides_its_curve_by_click_and_by_key(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    loss = panel(tab, "Loss")
    name = loss.get_by_role("button", name="train")
    before = ink_of(loss, "#0067a5")
    name.click()
    assert name.get_attribute("aria-pressed") == "false"
    wait_for(lambda: ink_of(loss, "#0067a5") == 0, "no curve")
    name.press("Enter")
    assert name.get_attribute("aria-pressed") == "true"
    wait_for(lambda: ink_of(loss, "#0067a5") == before, "the curve")


def test_a_hidden_part_of_a_stack_leaves_the_sum(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    chart = panel(tab, "One step of parts")
    assert "together 200 ms" in chart.locator(".legend").inner_text()
    chart.get_by_role("button", name="compute").click()
    assert "together 0 s" in chart.locator(".legend").inner_text()


def test_a_column_of_a_stack_goes_from_the_x_before_to_its_own(open_page: OpenPage) -> None:
    parts = [Curve("compute", [20.0, 100.0], [0.1, 0.4])]
    tab = open_page(with_panels([Stacked("stack", "Parts", "step", "seconds", [20.0, 100.0], parts, begin=0.0)]))
    chart = panel(tab, "Parts")
    box = chart.locator(".u-over").bounding_box()
    for share, said in ((0.03, "step 20"), (0.17, "step 20"), (0.23, "step 100"), (0.99, "step 100")):
        tab.mouse.move(box["x"] + share * box["width"], box["y"] + 50)
        assert chart.locator(".legend-place").inner_text() == said
    filled = [
        tab.evaluate(
            """([canvas, x, y]) => {
              const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
              copy.drawImage(canvas, 0, 0);
              return copy.getImageData(x, y, 1, 1).data[3] > 0;
            }""",
            [
                chart.locator("canvas").element_handle(),
                box["x"] + share * box["width"] - chart.locator("canvas").bounding_box()["x"],
                box["y"] + box["height"] / 2 - chart.locator("canvas").bounding_box()["y"],
            ],
        )
        for share in (0.05, 0.17, 0.23, 0.95)
    ]
    assert filled == [False, False, True, True], "half of the height is above the first column, and in the second"
    chart.get_by_role("button", name="Table").click()
    assert chart.locator("tr").all_inner_texts() == ["step\tcompute", "20\t100 ms", "100\t400 ms"]


def test_seconds_have_an_axis_of_their_own(open_page: OpenPage) -> None:
    curve = Curve("memory", [0.0, 0.25, 0.5], [1e6, 3e6, 2e6])
    tab = open_page(with_panels([Lines("memory", "Memory", "seconds", "bytes", [curve], unit="B")]))
    chart = panel(tab, "Memory")
    assert "0 s to 500 ms." in chart.get_by_role("img").get_attribute("aria-label")
    chart.get_by_role("img").press("Home")
    chart.get_by_role("img").press("ArrowRight")
    assert chart.locator(".legend-place").inner_text() == "250 ms"
    chart.get_by_role("button", name="Table").click()
    assert chart.locator("tr").all_inner_texts()[:2] == ["time\tmemory", "0 s\t1 MB"]


def test_long_cells_wrap_numbers_do_not_and_neighbouring_shares_differ(open_page: OpenPage) -> None:
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*>>"
    cells = Table("gaps", "Gaps", ["at", "after", "before"], [["781 ms", kernel, kernel]], [True, False, False])
    parts = [Share(name, amount, number < 5) for number, (name, amount) in enumerate(
        [("a", 1000.0), ("b", 0.1), ("c", 50.0), ("d", 40.0), ("e", 30.0), ("f", 20.0), ("g", 10.0), ("h", 9.0)]
    )]  # fmt: skip
    tab = open_page(with_panels([cells, Shares("whole", "Whole", "s", parts)]))
    scroll = panel(tab, "Gaps").locator(".scroll")
    assert scroll.evaluate("(one) => one.scrollWidth <= one.clientWidth"), "all columns fit"
    shares = panel(tab, "Whole")
    little = shares.locator(".share-part", has_text="< 0.1 %").bounding_box()
    assert little["height"] == shares.locator(".share-part").first.bounding_box()["height"], "on one line"
    colours = shares.locator(".share").evaluate_all("(all) => all.map((one) => one.style.backgroundColor)")
    assert len(set(colours)) == len(parts)


def test_a_heat_map_whose_values_are_alike_says_so(open_page: OpenPage) -> None:
    layer = HeatLayer("busy", "share", [[0.9, 0.9], [0.9, 0.9]])
    tab = open_page(with_panels([Heat("heat", "Busy", "step", [1.0, 2.0], ["rank 0", "rank 1"], [layer])]))
    assert panel(tab, "Busy").locator(".scale").inner_text() == "90 % everywhere"


def test_one_point_alone_says_where_it_is(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    assert panel(tab, "One step").locator(".legend-place").inner_text() == "step 1"


def test_the_mouse_reads_values_and_drags_a_zoom_which_a_double_click_resets(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    loss = panel(tab, "Loss")
    legend = loss.locator(".legend")
    assert "last values" in legend.inner_text()
    drag(tab, loss, 0.25, 0.5)
    reset = loss.get_by_role("button", name="Reset zoom")
    assert reset.is_visible()
    box = loss.locator(".u-over").bounding_box()
    tab.mouse.move(box["x"] + 2, box["y"] + 20)
    step = int(re.search(r"step ([\d,]+)", legend.inner_text()).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert 700 < step < 800, "a quarter of 3000 steps"
    # The other charts over steps show the same one.
    assert f"step {step:,}" in panel(tab, "Learning rate").locator(".legend").inner_text()
    loss.locator(".u-over").dblclick()
    assert not reset.is_visible()


def test_keys_read_values_and_zoom(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    loss = panel(tab, "Loss")
    chart = loss.get_by_role("img")
    chart.focus()
    chart.press("Home")
    assert "step 1" in loss.locator(".legend-place").inner_text()
    chart.press("ArrowRight")
    assert "step 6" in loss.locator(".legend-place").inner_text()
    wait_for(lambda: tab.locator("[aria-live=polite]").inner_text().startswith("step 6. train "), "what is said aloud")
    chart.press("+")
    assert loss.get_by_role("button", name="Reset zoom").is_visible()
    chart.press("0")
    assert not loss.get_by_role("button", name="Reset zoom").is_visible()


def test_a_chart_says_its_range_and_last_value(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    label = panel(tab, "Holes").get_by_role("img").get_attribute("aria-label")
    assert "step 1 to step 5. train: from 2 to 3, last 2 at step 5." in label


def test_the_axis_can_be_logarithmic(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    loss = panel(tab, "Loss")
    switch = loss.get_by_role("button", name="Log")
    picture = loss.locator("canvas").screenshot()
    switch.click()
    assert switch.get_attribute("aria-pressed") == "true"
    wait_for(lambda: loss.locator("canvas").screenshot() != picture, "another picture")
    assert panel(tab, "Gradient norm").get_by_role("button", name="Log").get_attribute("aria-pressed") == "true"


def test_values_as_a_table(open_page: OpenPage) -> None:
    tab = open_page(example.sparse_page())
    holes = panel(tab, "Holes")
    holes.get_by_role("button", name="Table").click()
    assert holes.locator("tr").all_inner_texts() == [
        "step\ttrain", "1\t3", "2\tnot finite", "3\t2.5", "4\tnot finite", "5\t2",
    ]  # fmt: skip
    holes.get_by_role("button", name="Table").click()
    assert holes.locator("table").count() == 0
    long = panel(open_page(example.example_page()), "Loss")
    long.get_by_role("button", name="Table").click()
    assert long.locator("tbody tr").count() == 100
    long.get_by_role("button", name="Show all 600 rows").click()
    assert long.locator("tbody tr").count() == 600


def test_a_heat_map_is_read_cell_by_cell_and_layer_by_layer(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    heat = panel(tab, "Each rank over time")
    picture = heat.get_by_role("img")
    assert "highest on average rank 5 (node2)" in picture.get_attribute("aria-label")
    picture.focus()
    picture.press("ArrowDown")
    picture.press("ArrowDown")
    assert heat.locator(".readout").inner_text().startswith("rank 1 (node1), step 1: 1")
    heat.get_by_role("button", name="waiting").click()
    assert "highest on average rank 5" not in picture.get_attribute("aria-label")
    box = picture.bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + 5 * 24 + 12)
    assert heat.locator(".readout").inner_text().startswith("rank 5 (node2), step 2,996: ")


def test_an_axis_of_the_mesh_shows_who_talks(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    mesh = panel(tab, "The mesh")
    mesh.get_by_role("button", name="dp = 2").click()
    assert mesh.locator(".readout").inner_text() == "dp: 4 groups of 2 ranks; sums of gradients, once a step."
    assert mesh.locator(".group").count() == 4
    picture = mesh.get_by_role("img")
    picture.focus()
    for _ in range(6):
        picture.press("ArrowRight")
    text = mesh.locator(".readout").inner_text()
    assert text == "rank 5 on node2: pp 1, dp 0, tp 1; it holds the others up; with ranks 5, 7 on dp."


def test_a_mesh_of_4096_ranks_is_drawn_with_every_number(open_page: OpenPage) -> None:
    mesh = example.mesh({"pp": 8, "dp": 4, "fsdp": 16, "tp": 8}, 8)
    tab = open_page(with_panels([mesh]))
    numbers = panel(tab, "The mesh").locator("text.rank").all_text_contents()
    assert numbers == [str(rank) for rank in range(4096)]


def test_the_timetable_tells_what_a_place_did(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    chart = panel(tab, "One step of the pipeline")
    picture = chart.get_by_role("img")
    picture.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        picture.press(key)
    assert chart.locator(".readout").inner_text() == (
        "place 1, stage 1: forward of micro-batch 1, 11 ms, from 22 ms to 33 ms"
    )


def test_events_are_filtered_by_level(open_page: OpenPage) -> None:
    tab = open_page(example.example_page())
    events = panel(tab, "Attempts")
    assert events.get_by_role("status").inner_text() == "34 of 34 events"
    events.get_by_role("button", name="info 29").click()
    assert events.get_by_role("status").inner_text() == "5 of 34 events"
    assert events.locator("tbody tr").count() == 5
