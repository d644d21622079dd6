"""Who is to blame for a failure, whether the run starts again, and what people are told; without any process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.checkpoint.disk.format import step_folder
from lockstep.errors import InvariantError, MemoryFullError, NonFiniteError, SaveError, UserError
from lockstep.launch import agent as agent_module
from lockstep.launch import supervise as module
from lockstep.launch.nodes import Nodes
from lockstep.launch.supervise import Policy, Supervisor
from lockstep.record.failure import (
    MISMATCHED,
    Failure,
    Kind,
    failed_folder,
    of_exception,
    of_exit,
    record,
    recorded,
    root_cause,
    short_host,
    user_call,
    user_line,
)
from lockstep.record.folder import RunFolder, this_attempt
from lockstep.record.log import EventLog
from lockstep.runtime import stop_signals as early
from lockstep.runtime.rank_env import LAUNCH
from tests.events import read_events
from tests.patience import wait_for

HOST = short_host()


@pytest.fixture(autouse=True)
def leaves_nothing_to_later_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor tells its workers through the environment, and so would tell the next test's."""
    monkeypatch.setenv(LAUNCH, "{}")


def failure(
    rank: int, kind: Kind = "exception", text: str = "ValueError: bad", at: float = 1.0, **more: Any
) -> Failure:
    return Failure(rank, HOST, kind, text, time=at, **more)


# Who was first ----------------------------------------------------------------------------------------------------


def test_the_earliest_of_equals_is_the_cause() -> None:
    first, second = failure(2, at=1.0), failure(0, at=2.0)
    assert root_cause([second, first]) == first


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:33114",
        "DistNetworkError: The client socket has failed to connect to any network address",
        "DistBackendError: NCCL communicator was aborted on rank 1",
        "RuntimeError: Connection reset by peer",
        "DistStoreError: wait timeout after 30000ms, keys: /a",
        "RuntimeError: Broken pipe",
        "ConnectionRefusedError: [Errno 111] Connection refused",
    ],
)
def test_what_only_tells_of_another_rank_is_no_cause(text: str) -> None:
    told, killed = failure(0, text=text, at=1.0), failure(1, "signal", "was killed by SIGKILL", at=2.0)
    assert root_cause([told, killed]) == killed
    assert root_cause([told]) is None


def test_an_exit_or_a_signal_that_speaks_of_connections_is_a_cause_all_the_same() -> None:
    exited = failure(0, "exit", "called sys.exit('connection refused')")
    assert root_cause([exited]) == exited


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        ("refused", "hang"),
        ("hang", "memory"),
        ("memory", "exception"),
        ("memory", "signal"),
        ("exception", "left"),
        ("exit", "left"),
    ],
)
def test_some_kinds_explain_others_whoever_was_first(stronger: Kind, weaker: Kind) -> None:
    assert root_cause([failure(0, weaker, at=1.0), failure(1, stronger, at=2.0)]) == failure(1, stronger, at=2.0)


def test_nothing_recorded_has_no_cause() -> None:
    assert root_cause([]) is None


def test_what_is_recorded_is_read_back_earliest_first_and_torn_files_are_passed_over(tmp_path: Path) -> None:
    record(tmp_path, failure(1, at=2.0))
    record(tmp_path, failure(0, at=1.0, where="train.py:3 in <module>", micro_batch=8))
    (tmp_path / "logs" / "failed" / "other.7.json").write_text('{"rank": ')
    assert [one.rank for one in recorded(tmp_path)] == [0, 1]
    assert recorded(tmp_path)[0].micro_batch == 8


@pytest.mark.parametrize("known", ["hang", "signal", "memory"])
def test_a_lost_connection_does_not_hide_what_is_known_of_a_rank(tmp_path: Path, known: Kind) -> None:
    lost = failure(1, text="RuntimeError: Connection closed by peer", at=2.0)
    record(tmp_path, failure(1, known, at=1.0))
    record(tmp_path, lost)
    assert [one.kind for one in recorded(tmp_path)] == [known]
    record(tmp_path, replace(lost, text="ValueError: bad"))
    assert [one.kind for one in recorded(tmp_path)] == ["exception"]


# What a process leaves --------------------------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind", "final"),
    [
        (ValueError("bad"), "exception", False),
        (KeyboardInterrupt(), "exception", False),
        (SystemExit(3), "exit", False),
        (UserError("a", "b"), "refused", True),
        (MemoryFullError("full", 8), "memory", False),
        (NonFiniteError("loss", 3, 1, [5]), "exception", True),
        (InvariantError("replicas differ"), "exception", True),
        (SaveError("the disk is full"), "exception", True),
    ],
)
def test_exceptions_are_told_apart(error: BaseException, kind: str, final: bool) -> None:
    told = of_exception(raised(error), 3)
    assert (told.rank, told.host, told.kind, told.final) == (3, HOST, kind, final)
    assert told.where.startswith("tests/unit/test_supervise.py:") or "test_supervise.py:" in told.where
    assert told.micro_batch == (8 if kind == "memory" else None)


@pytest.mark.parametrize(("code", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-6, "SIGABRT"), (-7, "SIGBUS")])
def test_signals_are_named(code: int, name: str, tmp_path: Path) -> None:
    told = of_exit(1, code, tmp_path / "none.log", "train.py:3 in <module>, forward and backward")
    assert told.kind == "signal"
    assert told.text == f"was killed by {name} (last seen at train.py:3 in <module>, forward and backward)"


def test_the_fault_handlers_stack_gives_the_users_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x00007f (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1 in wait\n\n'
        "Current thread 0x00007e (most recent call first):\n"
        '  File "/usr/lib/python3.11/site-packages/torch/x.py", line 7 in string_at\n'
        '  File "/home/me/train.py", line 31 in <module>\n'
        '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main\n'
    )
    told = of_exit(1, -11, log, "elsewhere")
    assert (told.text, told.where) == ("was killed by SIGSEGV", "/home/me/train.py:31 in <module>")


def test_gloos_last_words_about_sizes_are_understood(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "terminate called ... op.preamble.length <= op.nbytes. data size doesn't match expected size\n"
    )
    assert of_exit(0, -6, tmp_path / "log", "").is_mismatch


def test_lines_of_libraries_are_not_the_users() -> None:
    stack = [
        ("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_reduce"),
        ("/x/site-packages/torch/distributed/c10d_logger.py", 5, "wrapper"),
        ("/home/me/train.py", 12, "main"),
    ]
    assert user_line(stack) == "/home/me/train.py:12 in main"
    assert user_call(stack) == "dist.all_reduce"
    called = [("/x/site-packages/torch/nn/modules/module.py", 5, name) for name in ("_call_impl", "_wrapped_call_impl")]
    assert user_call([*stack[:2], *called, stack[-1]]) == "a layer"


# Whether the run starts again -------------------------------------------------------------------------------------


class Launch:
    """A launcher without processes: ranks fail as they are told, steps and checkpoints are only written down."""

    def __init__(self, path: Path, restarts: int = 3, on_oom: str = "stop", world: int = 2) -> None:
        (path / "logs").mkdir()
        self.path, self.attempt, self.said = path, 0, list[str]()
        told = {"run_dir": str(path), "scratch": str(path)}

        def say(text: str, *_: str) -> None:
            self.said.append(text)

        self.supervisor = Supervisor(RunFolder(path, 1), Nodes(), told, say, Policy(restarts, on_oom))
        self.world = world
        self.start()

    def start(self) -> None:
        self.attempt += 1
        self.supervisor.before_start()
        self.supervisor.meet(1, self.world)

    def emit(self, kind: str, **fields: Any) -> None:
        log = EventLog(self.path / "events.jsonl", self.attempt)
        log.emit(kind, **fields)
        log.close()

    def step(self, step: int) -> None:
        self.emit(
            "step", step=step, epoch=0.1, loss=1.0, grad_norm=1.0, lr=0.1, weight=1.0, items=1, padding=0, seconds=0.1,
            skipped=False, loss_scale=1.0,
        )  # fmt: skip

    def save(self, step: int) -> None:
        step_folder(self.path, step).mkdir(parents=True)

    def fails(self, *failures: Failure, codes: dict[int, int] | None = None) -> bool:
        for one in failures:
            record(self.path, one)
        self.supervisor.saw_first(codes if codes is not None else {one.rank: 1 for one in failures})
        again = self.supervisor.may_start_again()
        if again:
            self.start()
        return again

    @property
    def text(self) -> str:
        assert self.supervisor.outcome is not None
        return self.supervisor.outcome.text + self.supervisor.outcome.more

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [event for event in read_events(self.path / "events.jsonl") if event["kind"] == "failure"]


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Launch]:
    def make(**options: Any) -> Launch:
        return Launch(tmp_path, **options)

    return make


def trained(made: Launch, step: int = 25, saved: int = 20) -> Launch:
    made.step(step)
    made.save(saved)
    return made


@pytest.mark.parametrize("kind", ["exception", "exit", "hang", "left"])
def test_the_first_failure_of_a_run_with_a_checkpoint_is_tried_again(launch: Callable[..., Launch], kind: Kind) -> None:
    made = trained(launch())
    assert made.fails(failure(1, kind))
    assert "starting again from step 20" in made.said[0]
    assert made.failures[0]["restarted"]
    assert made.failures[0]["step"] == 25


def test_a_killed_rank_is_tried_again_even_before_the_first_checkpoint(launch: Callable[..., Launch]) -> None:
    made = launch()
    assert made.fails(codes={1: -9})
    assert f"rank 1 on {HOST} was killed by SIGKILL: starting again from the beginning" in made.said[0]


@pytest.mark.parametrize("kind", ["exception", "exit"])
def test_an_error_before_the_first_checkpoint_would_only_come_again(launch: Callable[..., Launch], kind: Kind) -> None:
    made = launch()
    assert not made.fails(failure(1, kind))
    assert "no step was done: mend that, then start it again" in made.text
    assert "goes on" not in made.text


def test_final_errors_are_not_retried(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert not made.fails(failure(1, final=True))
    assert made.supervisor.outcome is not None
    assert made.supervisor.outcome.code == 1


def test_refused_input_ends_with_2_and_its_sentence_alone(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert not made.fails(failure(0, "refused", "the batch is 0: give 1", final=True))
    assert made.supervisor.outcome is not None
    assert (made.supervisor.outcome.code, made.text) == (2, "the batch is 0: give 1")


def test_the_head_does_not_leave_before_every_node_has_read_why_the_run_is_refused(tmp_path: Path) -> None:
    told = {"run_dir": str(tmp_path), "scratch": str(tmp_path)}
    nodes = [Supervisor(RunFolder(tmp_path, 1), Nodes(2, 2, rank), told, lambda *_: None, Policy(3)) for rank in (0, 1)]
    for node in nodes:
        node.before_start()
        node.meet(2, 2, "round")
    record(tmp_path, failure(0, "refused", "the batch is 0: give 1", final=True), "round")
    leaving = Thread(target=nodes[0].may_start_again, daemon=True)
    leaving.start()
    wait_for((failed_folder(tmp_path, "round") / module.DECISION).exists, "the decision")
    leaving.join(0.2)  # which it would not need to leave
    assert leaving.is_alive()
    assert not nodes[1].may_start_again()
    leaving.join()
    assert [node.outcome and (node.outcome.code, node.outcome.text) for node in nodes] == [
        (2, "the batch is 0: give 1"),
        (2, "the batch is 0: give 1"),
    ]


@pytest.mark.parametrize("kind", ["exception", "exit", "hang"])
def test_the_same_failure_at_the_same_step_is_not_retried(launch: Callable[..., Launch], kind: Kind) -> None:
    made = trained(launch())
    assert made.fails(failure(1, kind))
    assert not made.fails(failure(1, kind, at=2.0))
    assert "the same way at the same step before" in made.text


def test_the_same_signal_at_the_same_step_is_retried(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert made.fails(codes={1: -9})
    assert made.fails(codes={1: -9})


def test_the_same_failure_further_on_is_retried(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert made.fails(failure(1))
    made.step(26)
    assert made.fails(failure(1))


def test_another_failure_at_the_same_step_is_retried(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert made.fails(failure(1))
    assert made.fails(failure(1, text="KeyError: 3"))


@pytest.mark.parametrize("restarts", [1, 2, 3])
def test_so_many_restarts_and_no_more(launch: Callable[..., Launch], restarts: int) -> None:
    made = trained(launch(restarts=restarts))
    assert [made.fails(codes={1: -9}) for _ in range(restarts + 1)] == [True] * restarts + [False]
    assert len(made.said) == restarts
    assert len(made.failures) == restarts + 1


def test_a_newer_checkpoint_refills_the_budget(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=1))
    for saved in range(30, 80, 10):
        assert made.fails(codes={1: -9})
        made.save(saved)
    assert made.fails(codes={1: -9})
    assert not made.fails(codes={1: -9})


def test_without_restarts_nothing_is_retried(launch: Callable[..., Launch]) -> None:
    assert not trained(launch(restarts=0)).fails(codes={1: -9})


def test_the_restarted_ranks_are_told_since_when_they_were_missed(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("lockstep.launch.supervise.os.environ", environment)
    made = trained(launch())
    assert "restart" not in json.loads(environment[LAUNCH])
    made.fails(codes={1: -9})
    restart = json.loads(environment[LAUNCH])["restart"]
    assert restart["failed"] <= restart["stopped"]


# Memory -----------------------------------------------------------------------------------------------------------

FULL = failure(1, "memory", "the host has no memory left", micro_batch=20)


def test_a_full_memory_halves_the_micro_batch_and_takes_nothing_from_the_budget(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=1, on_oom="shrink"))
    for size in (20, 10, 5, 2):
        assert made.fails(replace(FULL, micro_batch=size))
        assert this_attempt(made.path, 1)[1] == size // 2
    assert not made.fails(replace(FULL, micro_batch=1))
    assert [event["micro_batch"] for event in made.failures] == [10, 5, 2, 1, None]


def test_a_full_memory_shrinks_before_the_first_checkpoint_too(launch: Callable[..., Launch]) -> None:
    assert launch(on_oom="shrink").fails(FULL)


def test_a_full_memory_stops_the_run_where_that_was_asked_for(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    assert not made.fails(FULL)
    assert "no memory left" in made.text


def test_a_full_memory_is_told_of_its_rank_at_the_line_that_wanted_it(launch: Callable[..., Launch]) -> None:
    try:
        try:
            raise RuntimeError("can't allocate memory")
        except RuntimeError as cause:
            raise MemoryFullError("the host has no memory left", 20) from cause
    except MemoryFullError as error:
        wanted = error.__cause__.__traceback__.tb_lineno  # type: ignore[union-attr]
        full = of_exception(error, 1)
    assert f"test_supervise.py:{wanted} in" in full.where
    made = trained(launch())
    assert not made.fails(full)
    assert made.text.startswith(f"rank 1 on {HOST} failed: the host has no memory left")


def test_a_kill_by_the_kernel_is_a_full_memory(launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained(launch())
    monkeypatch.setattr(module, "oom_kills", lambda: made.supervisor._oom_kills + 1)
    assert not made.fails(codes={1: -9})
    assert made.failures[0]["cause"] == "memory"
    assert f"rank 1 on {HOST} was killed by the kernel (SIGKILL) because the node ran out of memory" in made.text


def test_a_verdict_on_a_hang_is_known_at_once(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    record(made.path, failure(1))
    assert not made.supervisor.knows_of_a_hang
    record(made.path, failure(0, "hang"))
    assert made.supervisor.knows_of_a_hang


# What people are told ---------------------------------------------------------------------------------------------


def test_the_verdict_names_everything(launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.supervise.sys.argv", ["/usr/bin/lockstep", "run", "train.py", "a b"])
    made = trained(launch(restarts=0, world=4))
    gone = "RuntimeError: Connection closed by peer"
    assert not made.fails(
        failure(2, where="train.py:31 in <module>", at=2.0), failure(0, text=gone), failure(1, text=gone)
    )
    lines = made.text.splitlines()
    assert lines[0] == f"rank 2 on {HOST} failed: ValueError: bad"
    assert lines[1] == "  at train.py:31 in <module>"
    assert lines[2] == "  the other 3 ranks ended because of it"
    assert lines[3] == "  it had done step 25; the same command goes on from step 20: lockstep run train.py 'a b'"
    assert made.supervisor.outcome is not None
    assert made.supervisor.outcome.log == made.path / "logs" / f"{HOST}.2.log"


def test_ranks_that_failed_alike_did_not_end_because_of_each_other(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=0, world=4))
    assert not made.fails(failure(2), failure(0, at=2.0), failure(1, at=3.0), codes={2: 1})
    lines = made.text.splitlines()
    assert lines[1:3] == ["  ranks 0-1 failed alike", "  the other rank ended because of it"]


def test_a_rank_that_leaves_early_is_told_when_the_others_only_lost_it(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=0))
    assert not made.fails(failure(0, text="RuntimeError: Connection closed by peer"), codes={1: 0, 0: 1})
    assert f"rank 1 on {HOST} ended with exit code 0 while the others were still training" in made.text
    assert made.failures[0]["cause"] == "left"


def test_an_exit_without_a_word_is_told_by_its_code(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=0))
    assert not made.fails(codes={1: 7})
    assert f"rank 1 on {HOST} exited with code 7" in made.text


LOST = "RuntimeError: Connection closed by peer"


def test_sizes_that_do_not_go_together_are_told_by_what_was_given(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=0))
    call: dict[str, Any] = {"call": "dist.all_reduce", "where": "train.py:9 in <module>"}
    aborted = failure(1, "signal", f"was killed by SIGABRT{MISMATCHED}", **call)
    assert not made.fails(aborted, failure(0, text=LOST, **call, shapes=["float32 [3]"]))
    assert made.failures[0]["cause"] == "hang"
    assert "dist.all_reduce at train.py:9" in made.text
    assert "rank 0 gave float32 [3], rank 1 gave something else" in made.text
    assert "SIGABRT" not in made.text


def test_sizes_that_do_not_go_together_are_told_in_terms_of_calls(launch: Callable[..., Launch]) -> None:
    made = trained(launch(restarts=0))
    aborted = failure(
        1, "signal", f"was killed by SIGABRT{MISMATCHED}", call="run.save", where="train.py:9 in <module>"
    )
    assert not made.fails(aborted, failure(0, text=LOST, call="engine.step", where="train.py:5 in <module>"))
    assert made.failures[0]["cause"] == "hang"
    assert "every rank has to call run.save" in made.text
    assert "engine.step at train.py:5" in made.text


def test_what_was_given_to_a_collective_is_read_from_the_traceback() -> None:
    with pytest.raises(ValueError, match="process group") as caught:
        torch.distributed.all_gather([torch.empty(3), torch.empty(3)], torch.ones(4))
    told = of_exception(caught.value, 0)
    assert (told.call, told.shapes) == ("dist.all_gather", ["float32 [3]", "float32 [4]"])


@pytest.mark.parametrize("blamed", [None, 1])
def test_ranks_that_stop_together_are_not_told_as_one_that_failed(
    launch: Callable[..., Launch], blamed: int | None
) -> None:
    made = trained(launch(restarts=0, world=3))
    error = NonFiniteError("loss", 26, blamed, [5])
    assert not made.fails(*(of_exception(raised(error), rank) for rank in (1, 0, 2)), codes={0: 1, 1: 1, 2: 1})
    on = "" if blamed is None else " on rank 1"
    assert made.text.startswith(f"all 3 ranks stopped: NonFiniteError: the loss is not finite at step 26{on} (")
    assert "failed alike" not in made.text
    assert "because of it" not in made.text
    assert made.failures[0]["rank"] == (blamed or 0)


@pytest.mark.parametrize(("reason", "code"), [("interrupted", 130), ("terminated", 75)])
def test_a_stop_on_purpose_is_no_failure(launch: Callable[..., Launch], reason: str, code: int) -> None:
    made = trained(launch())
    made.emit("stop", reason=reason, step=25, text="saved")
    assert not made.fails(codes={0: code, 1: code})
    assert made.supervisor.outcome is not None
    assert (made.supervisor.outcome.code, made.text) == (code, "")
    assert made.failures == []


def test_ctrl_c_twice_is_no_failure_either(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    made.supervisor.was_cut_short = True
    assert not made.fails(codes={0: -9, 1: -9})
    assert made.supervisor.outcome is not None
    assert made.supervisor.outcome.code == 130
    assert made.text.startswith("stopped at once; the same command goes on from step 20: ")
    assert made.failures == []


def test_a_stop_of_an_earlier_start_does_not_hide_a_failure(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    made.emit("stop", reason="terminated", step=25, text="saved")
    made.attempt = 2
    made.step(26)
    assert made.fails(codes={1: -9})


def test_what_a_failed_run_says_of_itself_is_not_a_stop_on_purpose(launch: Callable[..., Launch]) -> None:
    made = trained(launch())
    made.emit("stop", reason="failed", step=25, text="ValueError: bad")
    assert made.fails(failure(1))


def test_a_third_ctrl_c_does_not_make_the_second_one_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the workers are known to be dead."""
    handlers: list[Any] = []

    def listen(handle: Any) -> dict[Any, Any]:
        handlers.append(handle)
        return {}

    monkeypatch.setattr(early, "listen", listen)
    monkeypatch.setattr(early, "remember", lambda _: None)
    supervisor = SimpleNamespace(has_begun=True, was_cut_short=False)
    agent: Any = SimpleNamespace(
        stopping=None, is_meeting=False, has_workers=True, supervisor=supervisor, pass_on=lambda _: None
    )
    with agent_module._signals_passed_on(agent):
        handlers[0](signal.SIGINT, None)
        assert not supervisor.was_cut_short
        handlers[0](signal.SIGINT, None)
        agent.has_workers = False
        handlers[0](signal.SIGINT, None)
    assert supervisor.was_cut_short
