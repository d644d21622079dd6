"""The suite hears every signal, however it was started: `nohup make test &` is no reason for a test to fail."""

from __future__ import annotations

import signal
import subprocess
import sys

STARTED = """
import subprocess, sys
from tests.signals import hear_all
hear_all()
print(subprocess.run(["grep", "^Sig[BI]", "/proc/self/status"], capture_output=True, text=True).stdout)
"""


def test_what_tests_start_ignores_and_blocks_nothing() -> None:
    ignoring = ["sh", "-c", 'trap "" INT HUP TERM QUIT USR1; exec "$@"', "sh", sys.executable, "-c", STARTED]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True, preexec_fn=_block_some) as process:
        said, _ = process.communicate()
    masks = {name: int(mask, 16) for name, mask in (line.split(":\t") for line in said.splitlines() if line)}
    assert masks["SigBlk"] == 0
    ignored = {number for number in signal.valid_signals() if masks["SigIgn"] >> (number - 1) & 1}
    assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ}, "Python's own"


def test_this_process_hears_every_stop() -> None:
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    assert [number for number in heard if signal.getsignal(number) == signal.SIG_IGN] == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def _block_some() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR2])
