"""What a fault costs: Lockstep next to torchrun --max-restarts=3 with a snapshot script written by hand.

    python benchmarks/faults.py                              # every fault once, 10 M parameters, two CPU ranks
    python benchmarks/faults.py --width 32                   # a tiny model: starts and the launcher alone
    python benchmarks/faults.py --faults kill --rounds 5     # one fault, several times: medians
    python benchmarks/faults.py --faults --write             # the figures so far into docs/faults.md

The faults are those of tests/faults/planted.py; the peer is benchmarks/snapshot_training.py. They take turns, fault by
fault, in rotating order. Figures are kept in a file (`--json`), so that a long table can be measured in parts.

    detect        from the fault to the launcher's `failure` event; for torchrun to the first line it prints of it
    next step     from the fault to the end of the next training step
    lost          steps that were done and have to be done again

torchrun is measured as people run it, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 ("own store"), which Lockstep
sets too. Hangs end for both after the same six seconds without progress.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from measuring import in_turn, machine_text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cli.commands import clean_environment
from tests.faults.planted import BY_NAME, FAULTS, TIMEOUT, Fault, left_after, plant, processes_of, same_weights

WIDTH = 3150
"""Of a hidden layer: 10 M parameters."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "faults.md"
BEGIN, END = "<!-- faults:begin -->", "<!-- faults:end -->"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
PEERS = ("torchrun", "torchrun, own store")
WITHOUT_PEER = ("kill-while-saving", "stop-file", "max-time", "nan-skip", "ctrl-c-twice", "memory")
"""Faults that the script written by hand does not have."""
SECONDS_FOR_ORPHANS = 20.0
MOST_SECONDS = 60.0
"""So long after a fault torchrun may take to get on; what it hangs in then may take half an hour."""

HUNG = 124
"""Written for an exit code where there was none in all that time."""

Figures = dict[str, Any]


def measure_lockstep(fault: Fault, folder: Path, width: int, undisturbed: Any) -> Figures:
    row = plant(fault, folder, width)
    told = row.output if row.code == 0 else "\n".join(row.tail)
    return {
        "code": row.code,
        "detect": row.detected,
        "next": row.next_step,
        "lost": row.lost,
        "recovered": row.recovered,
        "goes_on": fault.goes_on if row.weights is not None else "",
        "same": same_weights(row, undisturbed),
        "orphans": len(row.left),
        "names": names_in(told, fault),
        "ended": row.ended,
    }


def measure_torchrun(fault: Fault, folder: Path, width: int, own_store: bool) -> Figures:
    """The same under torchrun. A command that ended with a snapshot is started again where Lockstep's is."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    code, lines = torchrun(fault, folder, width, own_store)
    orphans = [] if code == HUNG else left_after(folder, SECONDS_FOR_ORPHANS)
    for process in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    struck = float((notes / "struck").read_text()) if (notes / "struck").exists() else None
    steps = [line.split() for line in (notes / "steps").read_text().splitlines()]
    done = [(int(began), int(step), float(at)) for began, step, at in steps]
    after = [one for one in done if struck is not None and one[2] > struck and one[1] == one[0] + 1]
    finished = (notes / "weights.pt").exists()
    told = [at for at, line in lines if struck and at > struck and re.search("exitcode|closing signal|signal", line)]
    text = [line for _, line in lines]
    return {
        "code": code,
        "detect": told[0] - struck if told and struck else None,
        "next": after[0][2] - struck if after and struck else None,
        "lost": max(step for began, step, _ in done if began == done[0][0]) - after[0][0] if after else None,
        "goes_on": "restart" if finished and after else "same start" if finished else "",
        "same": finished and same_tensors(notes / "weights.pt", folder.parent / "torchrun.pt"),
        "orphans": len(orphans),
        "names": names_in("\n".join(text if code == 0 else text[-15:]), fault),
    }


def torchrun(fault: Fault, folder: Path, width: int, own_store: bool) -> tuple[int, list[tuple[float, str]]]:
    """Exit code, and every line with the time at which it came."""
    script = shutil.copy(Path(__file__).with_name("snapshot_training.py"), folder / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={0 if fault.hangs else 3}", str(script), fault.name, str(folder / "notes"), str(width)]
    command.append(str(TIMEOUT if fault.hangs else 1800))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"} | ({OWN_STORE: "1"} if own_store else {})
    lines: list[tuple[float, str]] = []
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        lines.extend((time.time(), line.rstrip()) for line in process.stdout)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        code = HUNG
        process.kill()
    reader.join(1)
    return code, list(lines)


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return all(torch.equal(value, second[key]) for key, value in first.items())


def names_in(text: str, fault: Fault) -> list[str]:
    """Which of the things that people need stand in a text."""
    cause = next((word for word in (*fault.words[:1], "SIG") if word), "SIG")
    looked_for = {
        "rank": r"rank\W+(1|0)\b|ranks 0",
        "host": rf"on {re.escape(os.uname().nodename.split('.')[0])}\b|host\s*:",
        "cause": re.escape(cause),
        "line": r"train\.py:\d+|train\.py\", line \d+",
        "log": r"logs?/\S+\.log|error_file\s*: /",
        "command": r"lockstep run|the same command",
    }
    return [what for what, pattern in looked_for.items() if re.search(pattern, text)]


# The table --------------------------------------------------------------------------------------------------------


def seconds(rounds: Sequence[Figures], key: str) -> str:
    values = [one[key] for one in rounds if one.get(key) is not None]
    return f"{statistics.median(values):.1f}" if values else "-"


def what_happens(one: Figures) -> str:
    if one["code"] == HUNG:
        return f"hangs, for more than {MOST_SECONDS:.0f} s"
    bits = "the same bits" if one["same"] else "other numbers"
    texts = {
        "restart": f"starts again, {bits}",
        "same start": f"goes on, {bits}",
        "same command": f"ends with {one['code']}, the same command goes on, {bits}",
        "": f"ends with {one['code']}",
    }
    orphans = f"; {one['orphans']} processes left" if one["orphans"] else ""
    return texts[one["goes_on"]] + orphans


def named(one: Figures) -> str:
    return ", ".join(one["names"]) or "nothing"


def table(figures: dict[str, dict[str, list[Figures]]]) -> str:
    """A row for every fault, Lockstep's columns and torchrun's."""
    head = "| fault | where | what happens | detect s | next step s | lost | names "
    head += "| torchrun: what happens | detect s | next step s | lost | names |"
    lines = [head, "|" + "---|" * 12]
    for fault in FAULTS:
        ours = figures.get(fault.name, {}).get("lockstep", [])
        peer = figures.get(fault.name, {}).get("torchrun", [])
        cells = [f"`{fault.name}`: {fault.what}", fault.where]
        for rounds in (ours, peer):
            if not rounds:
                compared = rounds is ours or fault.name not in WITHOUT_PEER
                cells += ["not measured" if compared else "not compared", "-", "-", "-", "-"]
                continue
            last = rounds[-1]
            cells += [what_happens(last), seconds(rounds, "detect"), seconds(rounds, "next")]
            cells += ["-" if last["lost"] is None else str(last["lost"]), named(last)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rounds_of_kill(figures: dict[str, dict[str, list[Figures]]]) -> str:
    """The recovery from kill -9 of a rank: medians, and where Lockstep's time goes."""
    lines = []
    for name, rounds in figures.get("kill", {}).items():
        values = sorted(one["next"] for one in rounds if one["next"] is not None)
        if len(values) > 1:
            span = f"{statistics.median(values):.2f} s ({values[0]:.2f} to {values[-1]:.2f}, {len(values)} rounds)"
            never = len(rounds) - len(values)
            span += f"; {never} more never came to one in {MOST_SECONDS:.0f} s" if never else ""
            lines.append(f"- {name}: from `kill -9` to the next step {span}")
    parts = [one["recovered"] for one in figures.get("kill", {}).get("lockstep", []) if one["recovered"]]
    if lines and parts:
        medians = [f"{key} {statistics.median(part[key] for part in parts):.2f} s" for key in parts[0]]
        lines.append(f"- Lockstep's time by its `recovered` events: {', '.join(medians)}")
    return "\n".join(lines)


def size_of(width: str) -> str:
    parameters = int(width) ** 2 + 11 * int(width) + 1
    return f"{parameters / 1e6:.3g} million" if parameters > 100_000 else f"{parameters}"


def write_page(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def measure(names: Sequence[str], rounds: int, contenders: Sequence[str], width: int, kept: Path, folder: Path) -> None:
    """Fault by fault; every figure is printed and kept as soon as it is known."""
    figures = json.loads(kept.read_text()) if kept.exists() else {"widths": {}}
    figures.setdefault("machine", machine_text())
    found = figures["widths"].setdefault(str(width), {})
    undisturbed = plant(None, folder / "undisturbed", width)
    peers = [one for one in contenders if one in PEERS]
    if peers:
        (folder / "alone").mkdir()
        (folder / "alone" / "notes").mkdir()
        torchrun(Fault("none", "", "", 0), folder / "alone", width, own_store=False)
        shutil.copy(folder / "alone" / "notes" / "weights.pt", folder / "torchrun.pt")
    for number, name in enumerate(name for _ in range(rounds) for name in names):
        for contender in in_turn(contenders, number):
            if contender in PEERS and name in WITHOUT_PEER:
                continue
            place = folder / f"{name}-{number}-{contender.replace(', ', '-').replace(' ', '-')}"
            try:
                if contender == "lockstep":
                    one = measure_lockstep(BY_NAME[name], place, width, undisturbed)
                else:
                    one = measure_torchrun(BY_NAME[name], place, width, contender != "torchrun")
            except (subprocess.TimeoutExpired, OSError) as error:
                print(f"{name}, {contender}: {error!r}", flush=True)
                continue
            found.setdefault(name, {}).setdefault(contender, []).append(one)
            kept.write_text(json.dumps(figures, indent=1))
            print(f"{name}, {contender}, load {os.getloadavg()[0]:.1f}: {json.dumps(one)}", flush=True)
            shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", choices=BY_NAME, metavar="NAME", help="these only; --faults alone: none")
    parser.add_argument("--contenders", nargs="*", choices=("lockstep", *PEERS), default=["lockstep", "torchrun"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the hidden layer (default {WIDTH}: 10 M)")
    parser.add_argument("--json", type=Path, default=Path("faults.json"), help="where figures are kept and added to")
    parser.add_argument("--write", action="store_true", help="put the table into docs/faults.md")
    options = parser.parse_args()
    names = list(BY_NAME) if options.faults is None else options.faults
    if names:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            measure(names, options.rounds, options.contenders, options.width, options.json, Path(folder))
    figures = json.loads(options.json.read_text())
    width, faults = max(figures["widths"].items(), key=lambda item: len(item[1]))
    setting = f"Two CPU ranks over gloo; {figures['machine']}; torch {torch.__version__}."
    text = f"{setting} {size_of(width)} parameters:\n\n{table(faults)}"
    for width, faults in figures["widths"].items():
        if told := rounds_of_kill(faults):
            text += f"\n\nRank 1 is killed, {size_of(width)} parameters:\n\n{told}"
    print(text)
    if options.write:
        write_page(text)


if __name__ == "__main__":
    main()
