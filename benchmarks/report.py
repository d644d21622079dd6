"""What it costs to make the page of a long run: a million steps on 64 ranks, which never ran.

The event log is made up, with `ranks` and `machine` events every five seconds, a restart, validations and checkpoints.
Then a fresh process makes the page of it: its processor time (one thread does all of it, so that this is how long it
takes on a machine that does nothing else), the most memory it held and the size of the report are measured. Where
playwright and chromium are there, also how long a browser takes from opening the report until every panel in its window
is drawn. Exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.record.log import without_non_finite

ROOT = Path(__file__).resolve().parents[1]
MOST_SECONDS = 30.0
MOST_MEMORY = 1e9
MOST_BYTES = 5e6
MOST_DATA_BYTES = 2.5e6
MOST_OPENING = 2.0
OPENINGS = 5
DRAWN = """() => new Promise((done) => {
  const isSeen = (one) => one.getBoundingClientRect().top < innerHeight && one.getBoundingClientRect().bottom > 0;
  const look = () => {
    const seen = [...document.querySelectorAll(".panel")].filter(isSeen);
    if (document.querySelector(".headline") && seen.every((one) => one.querySelector(".body > *")))
      requestAnimationFrame(() => done(performance.now()));
    else setTimeout(look, 5);
  };
  look();
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="keep the run there, and use the one that is there")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "long"
        if not (folder / "events.jsonl").exists():
            began = time.perf_counter()
            write(folder, options.steps, options.ranks)
            print(f"made up the run in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, __file__, "--measure", str(folder)]
        told = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        if (seconds := opening(folder / "measured.html")) is not None:
            told["opening"] = seconds
        raise SystemExit(show(told, (folder / "events.jsonl").stat().st_size))


def write(folder: Path, steps: int, ranks: int) -> None:
    """The made-up run of the tests; only what changes from step to step is written out for each."""
    sys.path.insert(0, str(ROOT))
    from tests.runs import Made, run_events

    made = Made(
        steps=steps,
        ranks=ranks,
        hosts=max(1, ranks // 8),
        gpus=8,
        fails_after=(steps // 2 + 7,),
        validate_every=max(1, steps // 1000),
        save_every=max(1, steps // 1000),
        not_finite=range(1000, steps, max(1, steps // 100)),
        slow_compute={ranks // 2: 0.02},
    )
    folder.mkdir(parents=True)
    write_as_json = json.JSONEncoder().encode
    with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(write_as_json(without_non_finite(event)) + "\n" for event in run_events(made))


def measure(folder: Path) -> None:
    """In a process of its own: make the page and say what that took."""
    began = time.perf_counter()
    from lockstep.page.html import page_html
    from lockstep.page.make_page import build_page
    from lockstep.page.panels import as_json

    page = build_page([folder])
    report = page_html(page)
    whole = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    told = {"seconds": whole, "processor": time.process_time(), "memory": memory, "report": len(report.encode())}
    (folder / "measured.html").write_text(report, encoding="utf-8")
    data = json.dumps(as_json(page), separators=(",", ":"))
    print(json.dumps({**told, "data": len(data.encode())}))


def opening(report: Path) -> float | None:
    """The median of some seconds in which a browser opens a report and draws what its window shows; None without one.

    The window is tall: the first charts below the headline are in it.
    """
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        print("no chromium or no playwright: opening the report is not measured")
        return None
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        seconds = []
        for _ in range(OPENINGS):
            tab = browser.new_page(viewport={"width": 1440, "height": 2000})
            tab.goto(report.as_uri(), wait_until="commit")
            seconds.append(tab.evaluate(DRAWN) / 1000)
            tab.close()
        browser.close()
    return statistics.median(seconds)


def show(told: dict[str, float], log_bytes: int) -> int:
    """A table for people; 1 where a limit is broken."""
    rows = [
        ("processor time to read the log and make the page", told["processor"], MOST_SECONDS, "s", 1.0),
        ("most memory", told["memory"], MOST_MEMORY, "MB", 1e6),
        ("report", told["report"], MOST_BYTES, "MB", 1e6),
        ("of it data", told["data"], MOST_DATA_BYTES, "MB", 1e6),
    ]
    if "opening" in told:
        rows.append(("until a browser has drawn what it shows", told["opening"], MOST_OPENING, "s", 1.0))
    print(f"event log: {log_bytes / 1e6:.0f} MB; {told['seconds']:.1f} s went by, with whatever else the machine did")
    for name, value, limit, unit, size in rows:
        verdict = "ok" if value <= limit else "TOO MUCH"
        print(f"{name:<50}{value / size:10.2f} {unit:<3} of {limit / size:6.4g} {unit:<3} {verdict}")
    return int(any(value > limit for _, value, limit, _, _ in rows))


if __name__ == "__main__":
    main()
