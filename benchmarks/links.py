"""How far the planner's links are from published collectives: `links.py --points nccl_busbw.csv`.

The file has the columns system, op, gpus, nodes, bytes and busbw_gbs. One node is a ring by the link of the catalogue;
several are a ring inside of nodes and one between them. The catalogue's constants come from some of these points.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from statistics import mean

from lockstep.links.collective_cost import Collective, Link, bus_factor, predict
from lockstep.planner.machine.find_machine import find_machine
from lockstep.planner.machine.hardware import Machine

MACHINES = {
    "A100 (vTrain box)": "A100-SXM-80",
    "V100 (vTrain box)": "V100-SXM2-32",
    "HF H100 cluster (EFA)": "H100-SXM-80",
    "4 nodes x 8 GPUs (stas00, type not printed)": "A100-SXM-40",
    "Jean Zay V100-32": "V100-SXM2-32",
    "8xH100 DGX": "H100-SXM-80",
}


def seconds(machine: Machine, collective: Collective, gpus: int, nodes: int, size: float) -> float:
    """By the links of the catalogue."""
    each = gpus // nodes
    inside = predict(collective, "ring", each, size, machine.inside)
    # Every GPU of a node talks to its peers about its own part, and they share the node's cards.
    between = Link(machine.outside.alpha, machine.outside.beta * each)
    return inside + predict(collective, "ring", nodes, size / each, between)


def main() -> None:
    """Print the error of every system, operation and number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=Path, required=True)
    errors: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    with parser.parse_args().points.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["system"] not in MACHINES or not row["bytes"].isdigit():
                continue
            gpus, nodes, size = int(row["gpus"]), int(row["nodes"]), int(row["bytes"])
            collective: Collective = "all-reduce" if row["op"] == "all_reduce" else "all-gather"
            published = size * bus_factor(collective, gpus) / (float(row["busbw_gbs"]) * 1e9)
            machine = find_machine(MACHINES[row["system"]], gpus=gpus, nodes=nodes)
            key = (row["system"], row["op"], gpus, nodes)
            errors[key].append(seconds(machine, collective, gpus, nodes, size) / published - 1)
    print("| system | operation | GPUs | nodes | points | mean error | mean absolute | largest |")
    print("|---|---|---|---|---|---|---|---|")
    for (system, operation, gpus, nodes), found in errors.items():
        absolute = [abs(error) for error in found]
        shown = f"{mean(found):+.0%} | {mean(absolute):.0%} | {max(absolute):.0%}"
        print(f"| {system} | {operation} | {gpus} | {nodes} | {len(found)} | {shown} |")


if __name__ == "__main__":
    main()
