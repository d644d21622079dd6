"""What the bench promises to the tests that stand on it."""

from __future__ import annotations

import ctypes
import datetime
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.patience import patient, wait_for
from tests.ranks import MOST_LEFT_GROUPS, Job, RankFailed, RankPool

ROOT = Path(__file__).parents[2]


def pid(_job: Job) -> int:
    return os.getpid()


def describe(job: Job, word: str, punctuation: str = ".") -> str:
    return f"{word} {job.rank} of {job.world_size}{punctuation}"


def sum_of_ranks(job: Job) -> int:
    import torch
    import torch.distributed as dist

    job.init_process_group()
    total = torch.tensor([job.rank])
    dist.all_reduce(total)
    return int(total)


def meet_then_wait_for_the_others(job: Job, unlike_others: int, what_it_does: Callable[[], None]) -> None:
    """Rank `unlike_others` does something else while the others hang in a collective."""
    import torch.distributed as dist

    job.init_process_group()
    dist.barrier()
    if job.rank == unlike_others:
        what_it_does()
    dist.barrier()


def raise_value_error() -> None:
    raise ValueError("the learning rate is a fish")


def fail_bare_assertion() -> None:
    wanted, found = 3, 2 + 2
    assert found == wanted


def drop_connections_then_raise() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.5)
    raise_value_error()


def exit_with_three() -> None:
    sys.exit(3)


def exit_hard_with_three() -> None:
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def abort_in_c() -> None:
    ctypes.CDLL(None).abort()


def sleep_for_long() -> None:
    time.sleep(300)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks.run(describe, 3, "rank", punctuation="!") == ["rank 0 of 3!", "rank 1 of 3!", "rank 2 of 3!"]


def test_ranks_form_a_process_group(ranks: RankPool) -> None:
    assert ranks.run(sum_of_ranks, 4) == [6, 6, 6, 6]
    assert ranks.run(sum_of_ranks, 2) == [1, 1]


def test_processes_are_reused_and_added_when_needed(ranks: RankPool) -> None:
    two = ranks.run(pid, 2)
    four = ranks.run(pid, 4)
    assert len(set(four)) == 4
    assert four[:2] == two
    assert ranks.run(pid, 4) == four


KEPT: list[object] = []


def leave_groups(job: Job, count: int) -> int:
    import torch.distributed as dist

    for number in range(count):
        store = dist.FileStore(str(job.folder / str(number)), job.world_size)
        KEPT.append(dist.ProcessGroupGloo(store, job.rank, job.world_size, datetime.timedelta(seconds=patient(15))))
    return os.getpid()


def test_ranks_in_which_too_many_groups_were_left_are_replaced(ranks: RankPool) -> None:
    ranks.run(leave_groups, 2, MOST_LEFT_GROUPS + 1)  # whatever other tests have left
    before = ranks.run(leave_groups, 2, 1)
    assert ranks.run(leave_groups, 2, MOST_LEFT_GROUPS) == before
    assert not set(ranks.run(leave_groups, 2, 0)) & set(before)


@pytest.mark.parametrize("count", [0, 17])
def test_number_of_ranks_is_checked(ranks: RankPool, count: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 16 ranks, not {count}"):
        ranks.run(pid, count)


def leave_others_in_a_barrier(job: Job) -> None:
    import torch.distributed as dist

    job.init_process_group(timeout=2)
    if job.rank != 0:
        dist.barrier()


def test_rank_that_is_done_stays_connected_until_all_are(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 0 returned") as caught:
        ranks.run(leave_others_in_a_barrier, 2)
    assert caught.value.rank == 1
    assert "Timed out waiting" in caught.value.message


@pytest.mark.parametrize(
    ("what_it_does", "type_name", "text"),
    [
        (raise_value_error, "ValueError", "rank 2 raised ValueError: the learning rate is a fish"),
        (fail_bare_assertion, "AssertionError", "found = 4"),
        (drop_connections_then_raise, "ValueError", "rank 2 raised ValueError: the learning rate is a fish"),
        (exit_with_three, "SystemExit", "rank 2 raised SystemExit: 3"),
        (exit_hard_with_three, "RankDied", "rank 2 died: exit code 3"),
        (kill_itself, "RankDied", "rank 2 died: killed by SIGKILL"),
        (abort_in_c, "RankDied", "rank 2 died: killed by SIGABRT"),
    ],
)
def test_failing_rank_is_named_and_the_pool_goes_on(
    ranks: RankPool, what_it_does: Callable[[], None], type_name: str, text: str
) -> None:
    before = ranks.run(pid, 4)
    with pytest.raises(RankFailed) as caught:
        ranks.run(meet_then_wait_for_the_others, 4, 2, what_it_does)
    assert text in str(caught.value)
    assert caught.value.rank == 2
    assert caught.value.type_name == type_name
    if what_it_does is not exit_hard_with_three and what_it_does is not kill_itself:
        assert f"in {what_it_does.__name__}\n" in str(caught.value) + "\n"
    after = ranks.run(pid, 4)
    assert not set(before) & set(after)
    assert not any(map(is_running, before))
    assert ranks.run(sum_of_ranks, 4) == [6, 6, 6, 6]


def test_exception_itself_is_the_cause(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="is a fish") as caught:
        ranks.run(meet_then_wait_for_the_others, 2, 1, raise_value_error)
    assert caught.value.message == "the learning rate is a fish"
    assert isinstance(caught.value.exception, ValueError)
    assert caught.value.__cause__ is caught.value.exception


class TwoPartError(Exception):
    """Pickles, but cannot be built again from its one-part `args`."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause}: {fix}")


def raise_two_part_error(_job: Job) -> None:
    raise TwoPartError("no room", "use a smaller batch")


def return_what_cannot_be_pickled(_job: Job) -> Callable[[], None]:
    return lambda: None


def test_what_cannot_be_pickled_is_still_told(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="TwoPartError: no room: use a smaller batch") as caught:
        ranks.run(raise_two_part_error, 1)
    assert caught.value.exception is None
    with pytest.raises(RankFailed, match="Can't pickle local object"):
        ranks.run(return_what_cannot_be_pickled, 1)


@pytest.mark.parametrize("what_it_does", [sleep_for_long, stop_itself])
def test_hang_is_named_with_where_it_stands(ranks: RankPool, what_it_does: Callable[[], None]) -> None:
    with pytest.raises(RankFailed, match=r"still running after 2\.5 s") as caught:
        ranks.run(meet_then_wait_for_the_others, 4, 2, what_it_does, timeout=2.5)
    assert caught.value.type_name == "RankHung"
    assert all(f"rank {rank} still running after 2.5 s" in str(caught.value) for rank in range(4))
    assert "in barrier" in str(caught.value)
    assert ("in sleep_for_long" in str(caught.value)) == (what_it_does is sleep_for_long)
    assert ranks.run(sum_of_ranks, 4) == [6, 6, 6, 6]


def change_everything(job: Job) -> None:
    import torch

    job.init_process_group()
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["PATH"]
    os.chdir(job.folder)
    (job.folder / f"file-{job.rank}").touch()
    sys.stdout = sys.stderr = None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 300)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.randn(3), random.random()


def look_around(job: Job) -> dict[str, object]:
    import numpy
    import torch
    import torch.distributed as dist

    return {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "files": os.listdir(job.folder),
        "streams": (sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__),
        "signals": (str(signal.getsignal(signal.SIGTERM)), str(signal.getsignal(signal.SIGALRM))),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "process_group": dist.is_initialized(),
        "random": (torch.rand(1).item(), random.random(), numpy.random.random()),
    }


def folder_of(job: Job) -> Path:
    return job.folder


def test_a_job_leaves_nothing_behind(ranks: RankPool) -> None:
    before = ranks.run(look_around, 2)
    pids = ranks.run(pid, 2)
    ranks.run(change_everything, 2)
    assert ranks.run(look_around, 2) == before
    assert ranks.run(pid, 2) == pids
    assert before[0]["threads"] == 1
    assert before[0]["random"] == before[1]["random"]
    assert not any(folder.exists() for folder in ranks.run(folder_of, 2))


def die_when_told(_job: Job, word: Path) -> int:
    def die() -> None:
        wait_for(word.exists, "the word")
        os._exit(4)

    threading.Thread(target=die, daemon=True).start()
    return os.getpid()


def test_death_between_jobs_is_told_and_repaired(ranks: RankPool, tmp_path: Path) -> None:
    pids = ranks.run(die_when_told, 1, tmp_path / "die")
    (tmp_path / "die").touch()
    wait_until_gone(pids)
    with pytest.warns(UserWarning, match="rank 0 died: exit code 4"):
        assert ranks.run(sum_of_ranks, 2) == [1, 1]


def start_a_process_and_hang(job: Job, folder: Path) -> None:
    child = subprocess.Popen(["sleep", "300"])
    (folder / f"child-{job.rank}").write_text(str(child.pid))
    child.wait()


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(process_ids: list[int]) -> None:
    wait_for(lambda: not any(map(is_running, process_ids)), "the end of the processes")


def test_closed_pool_leaves_no_process() -> None:
    with RankPool() as pool:
        pids = pool.run(pid, 3)
        folder = pool.run(folder_of, 1)[0].parent
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))
    assert not folder.exists()
    with pytest.raises(ValueError, match="closed"):
        pool.run(pid, 1)


def test_processes_started_by_a_rank_end_with_it(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        ranks.run(start_a_process_and_hang, 2, tmp_path, timeout=2)
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(children) == 2
    wait_until_gone(children)


def test_ranks_die_with_a_killed_parent(tmp_path: Path) -> None:
    script = """
        from tests.dist.test_ranks import meet_then_wait_for_the_others, pid, stop_itself
        from tests.ranks import RankPool

        pool = RankPool()
        print(*pool.run(pid, 2), flush=True)
        pool.run(meet_then_wait_for_the_others, 2, 1, stop_itself, timeout=20)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        family = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert set(pids) < set(family)
        wait_for(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED, "the rank to stop")
        parent.kill()
    wait_until_gone(family)


def run_pytest(folder: Path, source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A session of its own under this suite's conftest."""
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-ra", *options],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def test_skips_fail_the_session_in_ci(tmp_path: Path) -> None:
    source = """
        import pytest

        @pytest.mark.gpu
        @pytest.mark.skip(reason="no such device")
        def test_gpu(): ...

        def test_other(): pytest.skip("felt like it")

        @pytest.mark.xfail(reason="known to be wrong")
        def test_wrong(): assert False

        def test_fine(): ...
    """
    lenient = run_pytest(tmp_path, source)
    assert lenient.returncode == 0, lenient.stdout
    for strict in (run_pytest(tmp_path, source, "--no-skips"), run_pytest(tmp_path, source, CI="true")):
        assert strict.returncode == 1, strict.stdout
        summary = strict.stdout.partition("skipped, which is a failure here")[2].partition("=== short")[0]
        assert "test_it.py::test_other: Skipped: felt like it" in summary
        assert "test_it.py::test_wrong: xfail known to be wrong" in summary
        assert "no such device" not in summary
    only_gpu = run_pytest(tmp_path, source, "--no-skips", "-k", "gpu or fine")
    assert only_gpu.returncode == 0, only_gpu.stdout


def test_test_that_takes_too_long_fails_alone(tmp_path: Path) -> None:
    source = """
        import pathlib, subprocess
        import pytest

        @pytest.mark.limit(0.5)
        def test_slow():
            process = subprocess.Popen(["sleep", "1000"])
            pathlib.Path("pid").write_text(str(process.pid))
            process.wait()

        def test_fine(): ...
    """
    session = run_pytest(tmp_path, source)
    assert session.returncode == 1
    assert "1 failed, 1 passed" in session.stdout
    assert "not done after 0.5 s" in session.stdout
    assert "most recent call first" in session.stdout
    assert not is_running(int((tmp_path / "pid").read_text())), "what it started ends with it"
