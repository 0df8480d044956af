"""The way to a node through the user's own ``ssh``, for what Paramiko cannot do: certificates, tokens, Kerberos."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon.errors import UnreachableError
from surgeon.node.ssh_config import ssh_command
from surgeon.node.transport import Completed, Transport, cut, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.node.target import Target

# What ssh exits with when it was ssh itself that failed.
_SSH_FAILED = 255


class OpenSshTransport(Transport):
    """Keeps one ``ssh`` as the master of a connection; each command is a session on it."""

    def __init__(self, target: Target) -> None:
        """Connect, without ever asking the user anything.

        Raises:
            UnreachableError: ``ssh`` does not get in.
        """
        self.name = target.host
        self.round_trips = 0
        self._folder = tempfile.TemporaryDirectory(prefix="surgeon-")
        socket = Path(self._folder.name, "s")
        self._through = [*ssh_command(target), "-T", "-o", "BatchMode=yes", "-o", f"ControlPath={socket}"]
        options = ["-o", f"ConnectTimeout={max(1, round(target.connect_timeout_s))}", "-o", "ServerAliveInterval=15"]
        if target.host_key_policy == "accept-new":
            options += ["-o", "StrictHostKeyChecking=accept-new"]
        self._complaints = Path(self._folder.name, "stderr")
        with self._complaints.open("wb") as complaints:
            self._master = subprocess.Popen(
                [*self._through, *options, "-M", "-N", "-o", "ControlPersist=no", "--", target.host],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
            )
        limit = time.monotonic() + target.connect_timeout_s
        while not socket.exists():
            if self._master.poll() is not None or time.monotonic() > limit:
                said = self._complaints.read_text("utf-8", "replace").strip() or "no connection in time"
                self.close()
                raise UnreachableError(
                    f"ssh does not get into {target.host}: {said}.",
                    advice=f"Make `ssh {target.host} true` work without a prompt.",
                    where=target.host,
                )
            time.sleep(0.02)

    def run(self, argv: Sequence[str], *, stdin: bytes, deadline_s: float) -> Completed:
        """Run a command on the node: quoted once, here, for the login shell that reads it there.

        Raises:
            UnreachableError: the connection broke, or the deadline passed.
        """
        self.round_trips += 1
        # Without the master, ssh would quietly connect anew.
        if self._master.poll() is not None:
            raise cut(self.name)
        try:
            done = subprocess.run(
                [*self._through, "-o", "ControlMaster=no", "--", self.name, shlex.join(argv)],
                check=False,
                input=stdin,
                capture_output=True,
                timeout=deadline_s,
            )
        except subprocess.TimeoutExpired as error:
            raise silent(self.name, deadline_s) from error
        if done.returncode == _SSH_FAILED:
            raise cut(self.name)
        return Completed(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        """Close the connection; may be called twice."""
        if self._master.poll() is None:
            self._master.terminate()
            try:
                self._master.wait(5)
            except subprocess.TimeoutExpired:
                self._master.kill()
                self._master.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()
