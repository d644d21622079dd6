"""What a fault costs a job of Slurm: each strikes a real training on a real Slurm with four nodes on this machine.

python benchmarks/slurm_faults.py --write                 # every fault once, the table into docs/slurm.md
python benchmarks/slurm_faults.py --faults crash preempted
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from measuring import machine_text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults.test_nodes import weights_of
from tests.slurm.cluster import cluster, why_no_slurm
from tests.slurm.faults import BY_NAME, FAULTS, STEPS, Row, SlurmFault, plant, submit

PAGE = Path(__file__).resolve().parent.parent / "docs" / "slurm.md"
BEGIN, END = "<!-- slurm-faults:begin -->", "<!-- slurm-faults:end -->"


def line(fault: SlurmFault, row: Row, undisturbed: dict[str, torch.Tensor]) -> str:
    same = bool(row.weights) and all(torch.equal(row.weights[name], one) for name, one in undisturbed.items())
    seconds = ["-" if one is None else f"{one:.1f}" for one in (row.detected, row.resumed)]
    bits = "the same bits" if same else "other numbers"
    cells = [f"`{fault.name}`: {fault.what}", f"{row.state}, {bits}", str(row.starts), *seconds, str(row.lost)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", default=[fault.name for fault in FAULTS], choices=list(BY_NAME))
    parser.add_argument("--write", action="store_true", help="put the table into docs/slurm.md")
    told = parser.parse_args()
    if (reason := why_no_slurm()) is not None:
        sys.exit(f"no Slurm here: {reason}")
    lines = [f"{machine_text()}:", "", "| fault | the job ends | starts | known s | next step s | lost steps |"]
    lines.append("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch, cluster(4) as slurm:
        job = submit(slurm, Path(scratch) / "undisturbed", pause=0)
        slurm.wait_for_job(job.number, "COMPLETED", seconds=120)
        undisturbed = weights_of(job.run_folder, STEPS)
        for name in told.faults:
            row = plant(slurm, BY_NAME[name], Path(scratch) / name)
            lines.append(line(BY_NAME[name], row, undisturbed))
            print(lines[-1], flush=True)
    if told.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(before + "\n".join([BEGIN, *lines, END]) + after)


if __name__ == "__main__":
    main()
