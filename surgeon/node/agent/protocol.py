"""What a verb is, what it gets, and how it refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Callable, Dict, Iterator, Optional, Set, TypeVar


class AgentError(Exception):
    """A refusal or a failure that the client is told about in these words.

    Attributes:
        code: the ``code`` of a class in surgeon/errors.py (``does-not-fit``, ``locked``, ...).
        message: what was expected and what was found.
        advice: what to do about it; may be empty.
        where: the file or process it is about; may be empty.
    """

    def __init__(self, code: str, message: str, advice: str = "", where: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.advice = advice
        self.where = where


class DeadlineError(AgentError):
    """The request's deadline has passed; whatever the verb was doing is to be undone on the way out."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            "failed",
            "The verb did not finish within its deadline of {:.0f} s on the node.".format(seconds),
            "Look at the node's load and at what the verb was waiting for, then try again.",
        )


class Context:
    """What a verb knows beside its arguments.

    Attributes:
        state: the state directory, absolute, owned by this user, mode 0700.
        lease: the token of the lease that the client says it holds.
        deadline: when the verb must have ended, on ``time.monotonic``'s clock.
    """

    def __init__(self, state: str, lease: Optional[str], deadline: float) -> None:
        self.state = state
        self.lease = lease
        self.deadline = deadline
        self._children: Set[int] = set()
        self._shields = 0
        self._late: Optional[DeadlineError] = None

    def remaining(self) -> float:
        """Return the seconds left until the deadline, never less than zero."""
        return max(0.0, self.deadline - time.monotonic())

    def adopt(self, pid: int) -> None:
        """Have the process group ``pid`` (a child started in its own session) killed at the deadline."""
        self._children.add(pid)

    def disown(self, pid: int) -> None:
        """Forget a child that has ended, or that is meant to outlive the verb."""
        self._children.discard(pid)

    def kill_children(self) -> None:
        """Kill every adopted child with its process group."""
        for pid in sorted(self._children):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        self._children.clear()

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Hold back the deadline while files are between two states; it is raised on leaving."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._late is not None and not self._shields:
            late, self._late = self._late, None
            raise late

    def expire(self, error: DeadlineError) -> None:
        """Raise ``error`` in the verb, or keep it until the verb's shield is down."""
        if self._shields:
            self._late = error
            return
        self.kill_children()
        raise error


Verb = Callable[[Dict[str, Any], Context], Dict[str, Any]]
VERBS: Dict[str, Verb] = {}

_Function = TypeVar("_Function", bound=Verb)


def verb(name: str) -> Callable[[_Function], _Function]:
    """Register a function as what answers ``name``."""

    def register(function: _Function) -> _Function:
        VERBS[name] = function
        return function

    return register
