"""Talks to the agent on a node: one verb, one answer, one round trip."""

from __future__ import annotations

import json
import secrets
import sys
from typing import TYPE_CHECKING, Any, Self

from surgeon import errors
from surgeon.errors import SurgeonError, UnreachableError
from surgeon.node.agent.boot import FRAME
from surgeon.node.bundle import bundle, command
from surgeon.node.local import LocalTransport
from surgeon.node.target import LOCAL, Target

if TYPE_CHECKING:
    from types import TracebackType

    from surgeon.node.transport import Completed, Transport

# The system's own first: it needs nothing but the standard library, and the first python3 on PATH is often a version
# manager's shim, which takes longer to start than the agent takes to answer.
INTERPRETERS = (
    "/usr/bin/python3",
    "python3",
    "/usr/local/bin/python3",
    "/opt/venv/bin/python3",
    "/opt/conda/bin/python3",
    "python",
)

# Seconds that the client waits beyond the deadline that the agent keeps itself, which ends up to 5 s late.
MARGIN_S = 10.0

_CLASSES: dict[str, type[SurgeonError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SurgeonError)
}


class Node:
    """A node with an agent that answers verbs. Use it in a ``with`` statement.

    Attributes:
        transport: the way to it.
        target: what was asked for.
        lease: the token of the lease that is sent with each request; set it once acquired.
    """

    def __init__(self, transport: Transport, target: Target) -> None:
        self.transport = transport
        self.target = target
        self.lease: str | None = None

    def __enter__(self) -> Self:
        """Return the node itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of the node."""
        self.close()

    def close(self) -> None:
        """Let go of the node; may be called twice."""
        self.transport.close()

    def call(self, verb: str, args: dict[str, Any] | None = None, *, deadline_s: float = 30.0) -> dict[str, Any]:
        """Have the agent do one thing and return what it says.

        Args:
            verb: what to do.
            args: JSON values; see the verb.
            deadline_s: seconds that the agent gives the verb; the client waits a little longer.

        Returns:
            The verb's result.

        Raises:
            UnreachableError: the node did not answer; the verb may have been done all the same.
            SurgeonError: the verb refused or failed; the class is the one that has the agent's ``code``.
        """
        request = {
            "verb": verb,
            "args": args or {},
            "deadline_s": deadline_s,
            "state_dir": self.target.state_dir,
            "lease": self.lease,
        }
        reply = self._ask(request, b"", deadline_s)
        if "need" in reply:
            reply = self._ask(request, bundle().data, deadline_s)
        if reply.get("ok"):
            return dict(reply["result"])
        if "error" in reply:
            raise self._error(reply["error"])
        raise UnreachableError(
            f"The agent on {self.transport.name} could not be kept there.", where=self.transport.name
        )

    def _ask(self, request: dict[str, Any], agent: bytes, deadline_s: float) -> dict[str, Any]:
        body = json.dumps(request).encode("ascii")
        nonce = secrets.token_hex(8)
        argv = command(self._interpreters(), self.target.state_dir, nonce)
        stdin = b"%d %d\n" % (len(agent), len(body)) + agent + body
        completed = self.transport.run(argv, stdin=stdin, deadline_s=deadline_s + MARGIN_S)
        reply = unframe(completed.stdout, nonce)
        if reply is None:
            raise self._speechless(completed)
        return reply

    def _interpreters(self) -> tuple[str, ...]:
        if self.target.node_python:
            return (self.target.node_python,)
        return (sys.executable, *INTERPRETERS) if self.target.host == LOCAL else INTERPRETERS

    def _speechless(self, completed: Completed) -> UnreachableError:
        name = self.transport.name
        said = completed.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        detail = f" It said: {' '.join(said)}" if said else ""
        if b"surgeon: no python" in completed.stderr:
            tried = ", ".join(self._interpreters())
            return UnreachableError(
                f"There is no Python 3.8 or later on {name}; tried {tried}.",
                advice="Name one with node_python; the one that runs sglang will do.",
                where=name,
            )
        return UnreachableError(
            f"The agent on {name} ended without an answer (exit status {completed.returncode}).{detail}",
            advice="What was asked may have been done all the same; the next command will tell.",
            where=name,
        )

    def _error(self, error: dict[str, Any]) -> SurgeonError:
        code = str(error.get("code") or "failed")
        kind = _CLASSES.get(code, SurgeonError)
        where = str(error.get("where") or self.transport.name)
        return kind(str(error.get("message")), advice=str(error.get("advice") or ""), where=where, code=code)


def unframe(stdout: bytes, nonce: str) -> dict[str, Any] | None:
    """Find the agent's answer in what came back; None when it is not there whole.

    Args:
        stdout: everything that the command printed, start-up files of the shell included.
        nonce: the word given with the command.
    """
    head = f"\n{FRAME} {nonce} ".encode("ascii")
    _, found, rest = stdout.partition(head)
    length, _, body = rest.partition(b"\n")
    if not found or not length.isdigit() or len(body) < int(length):
        return None
    reply = json.loads(body[: int(length)])
    return reply if isinstance(reply, dict) else None


def connect(target: Target) -> Node:
    """Open the way to a node.

    Raises:
        UnreachableError: it cannot be reached, or does not let us in.
        UsageError: its name cannot be one.
    """
    if target.host == LOCAL:
        return Node(LocalTransport(), target)
    # Paramiko takes a third of a second to import, which a local target does not owe.
    from surgeon.node.ssh import BeyondParamikoError, open_ssh

    try:
        return Node(open_ssh(target), target)
    except BeyondParamikoError as refused:
        from surgeon.node.openssh import OpenSshTransport

        try:
            return Node(OpenSshTransport(target), target)
        except UnreachableError:
            raise refused from None
