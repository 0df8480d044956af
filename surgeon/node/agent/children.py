"""Runs a program for a verb: its own session, no terminal, output read whole, killed at the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Dict, NamedTuple, Optional, Sequence

from .protocol import AgentError, Context

_SLACK_S = 2.0


class Ended(NamedTuple):
    """How a program ended.

    Attributes:
        returncode: its exit status; negative for a signal; None when it was killed at its time limit.
        stdout: what it wrote.
        stderr: what it complained.
        seconds: how long it ran.
    """

    returncode: Optional[int]
    stdout: bytes
    stderr: bytes
    seconds: float


def run(
    context: Context,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Optional[Dict[str, str]] = None,
    cwd: Optional[str] = None,
    timeout_s: Optional[float] = None,
) -> Ended:
    """Run ``argv`` to its end and return what it said.

    Args:
        context: the verb's context; its deadline kills the program's whole process group.
        argv: program and arguments; no shell is involved.
        stdin: what the program reads.
        env: its environment; None hands on the agent's.
        cwd: where it runs; None keeps the agent's.
        timeout_s: its own limit, when shorter than the verb's.

    Raises:
        AgentError: the program could not be started.
    """
    # The agent's alarm rings first, at the deadline; this only holds where there is none.
    limit = context.remaining() + _SLACK_S if timeout_s is None else timeout_s
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentError("failed", "Cannot run {}: {}.".format(argv[0], error.strerror), where=argv[0]) from error
    context.adopt(child.pid)
    try:
        out, err = child.communicate(stdin, timeout=limit)
        returncode: Optional[int] = child.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        returncode = None
    finally:
        if child.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        context.disown(child.pid)
    return Ended(returncode, out, err, time.monotonic() - began)
