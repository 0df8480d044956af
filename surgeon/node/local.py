"""The way to this machine: a child process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

from surgeon.errors import UnreachableError
from surgeon.node.target import LOCAL
from surgeon.node.transport import Completed, Transport, silent

if TYPE_CHECKING:
    from collections.abc import Sequence


class LocalTransport(Transport):
    """Runs commands here, each in a session of its own, as an SSH server would."""

    name = LOCAL

    def __init__(self) -> None:
        self.round_trips = 0

    def run(self, argv: Sequence[str], *, stdin: bytes, deadline_s: float) -> Completed:
        """Run a command here.

        Raises:
            UnreachableError: it cannot be started, or the deadline passed; its process group is killed then.
        """
        self.round_trips += 1
        try:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UnreachableError(f"Cannot run {argv[0]}: {error.strerror}.", where=LOCAL) from error
        with child:
            try:
                stdout, stderr = child.communicate(stdin, timeout=deadline_s)
            except subprocess.TimeoutExpired as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                raise silent(LOCAL, deadline_s) from error
        return Completed(child.returncode, stdout, stderr)

    def close(self) -> None:
        """Do nothing; there is nothing to let go of."""
