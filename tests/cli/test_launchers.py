"""One script, every launcher: started by whatever there is, it gives the numbers of plain python.

srun is in tests/slurm, ranks on several hosts are in tests/dist/test_network.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli.commands import LOCKSTEP, clean_environment, events, free_port, run
from tests.one_script import SCRIPT, assert_trained_alike, write_script

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCH = (sys.executable, "-m")
TWO = ("--nproc-per-node", "2")

LAUNCHERS = {
    "lockstep run": (*LOCKSTEP, "run", "--nproc", "2"),
    "torchrun": (str(Path(sys.executable).with_name("torchrun")), *TWO),
    "torch.distributed.run": (*TORCH, "torch.distributed.run", "--standalone", *TWO),
    "torch.distributed.launch --use-env": (*TORCH, "torch.distributed.launch", "--use-env", *TWO),
}
FAST = ("lockstep run", "torchrun")

SPAWNER = """
import os, runpy, sys
import torch.multiprocessing

def start(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = ["one.py"]
    runpy.run_path("one.py", run_name="__main__")

if __name__ == "__main__":
    torch.multiprocessing.spawn(start, (sys.argv[1],), nprocs=2)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which plain python ran the script, as one process."""
    folder = tmp_path_factory.mktemp("reference")
    must_run(folder, sys.executable, write_script(folder).name)
    assert_trained_alike(folder, folder, "single")
    return folder


@pytest.mark.slow
def test_two_runs_on_one_host_do_not_disturb_each_other(reference: Path, tmp_path: Path) -> None:
    """Also when they start at the same moment: each finds ports of its own."""
    folders = [tmp_path / name for name in ("one", "another")]
    started = []
    for folder in folders:
        folder.mkdir()
        command = (*LOCKSTEP, "run", "--nproc", "2", write_script(folder).name)
        environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
    assert [process.wait() for process in started] == [0, 0]
    for folder in folders:
        assert_trained_alike(folder, reference, "dp=2")


def must_run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = run(folder, *command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LAUNCHERS]
)
def test_the_unchanged_script_gives_the_numbers_of_plain_python(reference, tmp_path, launcher):
    must_run(tmp_path, *LAUNCHERS[launcher], write_script(tmp_path).name)
    assert_trained_alike(tmp_path, reference, "dp=2")


@pytest.mark.slow
def test_the_oldest_launcher_hands_each_rank_its_number_as_an_argument_and_nobody_minds(reference, tmp_path):
    note = "\nimport json, sys\nopen(f'arguments{run.rank}', 'w').write(json.dumps(sys.argv[1:]))\n"
    write_script(tmp_path).write_text(SCRIPT + note)
    must_run(tmp_path, *TORCH, "torch.distributed.launch", *TWO, "one.py")
    arguments = [json.loads((tmp_path / f"arguments{rank}").read_text()) for rank in range(2)]
    assert arguments == [["--local-rank=0"], ["--local-rank=1"]]
    assert_trained_alike(tmp_path, reference, "dp=2")


@pytest.mark.slow
def test_the_unchanged_script_runs_in_ranks_that_a_program_spawns(reference, tmp_path):
    write_script(tmp_path)
    (tmp_path / "spawner.py").write_text(SPAWNER)
    must_run(tmp_path, sys.executable, "spawner.py", str(free_port()))
    assert_trained_alike(tmp_path, reference, "dp=2")


@pytest.mark.slow
def test_ranks_that_a_script_spawned_itself_train_together(reference, tmp_path):
    body = SCRIPT.replace("init()", 'init(rank=rank, world_size=2, head=f"127.0.0.1:{port}")') + "run.close()\n"
    main = 'if __name__ == "__main__":\n    torch.multiprocessing.spawn(train, (sys.argv[1],), nprocs=2)\n'
    script = "import sys, torch\n\ndef train(rank, port):\n" + textwrap.indent(body, "    ") + "\n" + main
    (tmp_path / "one.py").write_text(script)
    must_run(tmp_path, sys.executable, "one.py", str(free_port()))
    assert_trained_alike(tmp_path, reference, "dp=2")


@pytest.mark.slow
def test_the_example_runs_unchanged_and_learns_the_same(tmp_path):
    launchers = {
        "plain python": (sys.executable,),
        "torchrun": (*TORCH, "torch.distributed.run", *TWO),
        "lockstep run": (*LOCKSTEP, "run", "--layout", "fsdp=2"),
    }
    first_losses = {}
    for name, launcher in launchers.items():
        (tmp_path / name).mkdir()
        done = must_run(tmp_path / name, *launcher, str(EXAMPLES / "digits.py"))
        assert re.search(r"step 200 \| validation loss .* \| accuracy 9.* \(3\d\d/359\)", done.stdout)
        steps = events(tmp_path / name / "runs" / "digits", "step")
        first_losses[name] = [event["loss"] for event in steps[:10]]
        assert len(first_losses[name]) == 10
    assert first_losses["torchrun"] == pytest.approx(first_losses["plain python"], rel=1e-6)
    assert first_losses["lockstep run"] == pytest.approx(first_losses["plain python"], rel=1e-6)
