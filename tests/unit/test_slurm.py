"""The script of a job: what stands in it for which job and cluster, and what is refused before there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from lockstep.config.cluster import Cluster, check_shared, find_cluster, known_clusters
from lockstep.errors import UserError
from lockstep.launch.cluster_job import ClusterJob
from lockstep.launch.slurm import check_job, render

GOLDEN = Path(__file__).parent.parent / "golden"
PAGE = Path(__file__).parent.parent.parent / "docs" / "clusters.md"
VENV = Path("/home/user/project/.venv")
SMALL = ClusterJob(
    "digits",
    ("train", "digits", "--layout", "dp=4", "--steps", "100"),
    Path("/home/user/project/runs/digits"),
    Path("/home/user/project"),
    nodes=2,
    least=2,
    processes=2,
    cpus=2,
    seconds=600,
)
LARGE = ClusterJob(
    "pretrain",
    ("run", "--layout", "dp=auto,fsdp=4", "train.py", "--data", "my files", "--lr", "1e-3"),
    Path("/scratch/user/runs/pretrain"),
    Path("/home/user/project"),
    nodes=4,
    least=3,
    processes=4,
    gpus=4,
    cpus=48,
    seconds=86400,
    lead=300,
)
SWEEP = ClusterJob(
    "sweep",
    ("train", "lm", "--set", "seed=%a"),
    Path("/shared/runs/sweep"),
    Path("/home/user/project"),
    processes=8,
    gpus=8,
    cpus=112,
    seconds=7200,
    lead=600,
    array="0-3%2",
)
CASES = {
    "slurm-plain.sbatch": (SMALL, None),
    "slurm-gpu.sbatch": (LARGE, "example-gpu"),
    "slurm-array-in-containers.sbatch": (SWEEP, "example-container"),
}


def script(name: str) -> str:
    job, cluster = CASES[name]
    return render(job, find_cluster(cluster), VENV)


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_on_record(name: str) -> None:
    assert script(name) == (GOLDEN / name).read_text(), f"python {Path(__file__).name} writes it anew"


@pytest.mark.parametrize("name", CASES)
def test_the_script_fits_on_a_page_and_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    text = script(name)
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= 160
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (.ci/install-slurm installs it)")
    (tmp_path / "job.sbatch").write_text(text)
    # 1090, 1091: it does not follow the user's own environment
    done = subprocess.run(
        ["shellcheck", "--exclude=SC1090,SC1091", "job.sbatch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def lines(job: ClusterJob, cluster: Cluster | None = None) -> list[str]:
    return render(job, cluster or Cluster(name="here"), None).splitlines()


def test_what_a_user_says_stays_one_word_of_the_command() -> None:
    quoted = next(line for line in lines(LARGE) if "lockstep run" in line)
    assert "train.py --data 'my files' --lr 1e-3 &" in quoted
    assert quoted.index("--run-dir") < quoted.index("train.py"), "options of lockstep stand before the script"


def test_a_job_without_requeue_does_not_go_back_into_the_queue() -> None:
    text = lines(replace(SMALL, requeue=False))
    assert "#SBATCH --no-requeue" in text
    assert not any("scontrol" in line for line in text)


def test_an_array_numbers_runs_and_words_and_requeues_its_own_task() -> None:
    text = "\n".join(lines(SWEEP))
    assert "run=/shared/runs/sweep-$SLURM_ARRAY_TASK_ID" in text
    assert '--set seed="$SLURM_ARRAY_TASK_ID"' in text
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' in text


def test_pyxis_takes_the_image_as_an_option_of_srun() -> None:
    cluster = find_cluster("example-container")
    software = cluster.software.model_copy(update={"container_with": "pyxis"})
    text = "\n".join(lines(SWEEP, cluster.model_copy(update={"software": software})))
    assert "--container-image=/shared/images/lockstep.sif" in text
    assert "apptainer" not in text


REFUSED = {
    "more GPUs than a node has": (replace(LARGE, gpus=5, processes=5), "use --gpus 4 and more nodes"),
    "more processes than GPUs": (replace(LARGE, processes=8), "use --nproc 4, or --share-gpu"),
    "more cores than a node has": (replace(LARGE, cpus=64), "use --cpus 48"),
    "a longer time than jobs may take": (replace(LARGE, seconds=2 * 86400), "use --time 24h"),
    "a time that starting and saving use up": (replace(LARGE, seconds=300), "use at least --time 7m"),
    "an array that is none": (replace(LARGE, array="a-b"), "write it like 0-3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_fail_in_the_job_is_refused_before(name: str) -> None:
    job, fix = REFUSED[name]
    with pytest.raises(UserError, match=fix):
        check_job(job, find_cluster("example-gpu"))


def test_a_lead_that_no_save_fits_into_is_refused() -> None:
    with pytest.raises(UserError, match="a checkpoint of this run took 400 s"):
        check_job(LARGE, find_cluster("example-gpu"), save_seconds=400)


# ---- Profiles


def test_a_centre_may_add_profiles_and_a_user_may_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, words in (("centre", "of the centre"), ("own/lockstep/clusters", "my own")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "big.toml").write_text(f'description = "{words}"\n')
    (tmp_path / "centre" / "small.toml").write_text("[node]\ngpus = 1\n")
    monkeypatch.setenv("LOCKSTEP_CLUSTERS", f"{tmp_path / 'centre'}{os.pathsep}{tmp_path / 'none'}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    assert {"big", "small", "example-gpu", "example-container"} <= known_clusters().keys()
    assert find_cluster("big").description == "my own"
    assert find_cluster("small").node.gpus == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[node]\ngpu_count = 4\n", "unknown key 'node.gpu_count'"),
        ("[node]\ngpus = 'four'\n", "node.gpus = 'four'"),
        ("[node\n", "is not TOML"),
    ],
)
def test_a_profile_with_a_mistake_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        find_cluster(str(tmp_path / "mine.toml"))


def test_a_name_that_is_no_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"unknown cluster .exmple-gpu.*example-gpu"):
        find_cluster("exmple-gpu")


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += keys_of(field.annotation, f"{name}.")
        elif field.description:
            default = "unset" if field.default in (None, "", []) else f"`{field.default}`".replace("`{}`", "unset")
            rows.append(f"| `{prefix}{name}` | {field.description} | {default} |")
    return rows


def profile_table() -> str:
    return "\n".join(["| key | what it says | default |", "|---|---|---|", *keys_of(Cluster)])


def test_the_page_for_centres_has_every_key() -> None:
    assert profile_table() in PAGE.read_text(), f"python {Path(__file__).name} writes it anew"


def test_a_run_folder_that_compute_nodes_do_not_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="compute nodes of example-gpu do not see"):
        check_shared(find_cluster("example-gpu"), tmp_path / "run")
    with pytest.raises(UserError, match="/tmp is this machine's own"):
        check_shared(Cluster(name="here"), Path("/tmp/run"))
    check_shared(find_cluster("example-gpu"), Path("/scratch/user/runs/one"))


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / case).write_text(script(case))
        print(f"wrote {GOLDEN / case}", file=sys.stderr)
    text = PAGE.read_text()
    begin, end = "<!-- profile:begin -->", "<!-- profile:end -->"
    before, after = text.partition(begin)[0], text.partition(end)[2]
    PAGE.write_text(f"{before}{begin}\n{profile_table()}\n{end}{after}")
