"""A UserError that ends a script is one sentence on stderr and exit code 2, as the commands have it."""

from __future__ import annotations

import functools
import io
import sys
import threading
import traceback
from types import TracebackType

from lockstep.errors import UserError
from lockstep.record.failure import OWN_CODE, user_line


@functools.cache  # once in a process
def answer_user_errors() -> None:
    """Let this process end in one sentence where a UserError ends it; other errors stay as they are."""
    previous, of_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            previous(kind, error, trace)
            return
        # torch's hook collects what is printed, and forgets it where this one raises (2.13).
        is_collected = type(sys.stderr) is io.StringIO and sys.__stderr__ is not None
        print(one_sentence(error), file=sys.__stderr__ if is_collected else sys.stderr, flush=True)
        raise SystemExit(2)  # Python would end with 1

    def in_thread(ended: threading.ExceptHookArgs) -> None:
        if isinstance(ended.exc_value, UserError):
            print(one_sentence(ended.exc_value), file=sys.stderr, flush=True)
        else:
            of_threads(ended)

    sys.excepthook, threading.excepthook = hook, in_thread


def one_sentence(error: UserError) -> str:
    """What is wrong, how to mend it, and the line of the script."""
    stack = traceback.extract_tb(error.__traceback__)[::-1]
    outside = [(at.filename, at.lineno or 0, at.name) for at in stack if not at.filename.startswith(OWN_CODE)]
    where = user_line(outside)
    return f"lockstep: {error}" + (f" (at {where})" if where else "")
