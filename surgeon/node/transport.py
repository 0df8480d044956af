"""What carries one command to a node and its output back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surgeon.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Completed:
    """A command that has ended.

    Attributes:
        returncode: its exit status; negative when it was killed.
        stdout: what it wrote, byte for byte.
        stderr: what it complained, byte for byte.
    """

    returncode: int
    stdout: bytes
    stderr: bytes


class Transport(ABC):
    """A way to a node that stays open from command to command.

    Attributes:
        name: what the node is called in messages.
        round_trips: how many commands it has carried since it was opened.
    """

    name: str
    round_trips: int = 0

    @abstractmethod
    def run(self, argv: Sequence[str], *, stdin: bytes, deadline_s: float) -> Completed:
        """Run a command on the node, feed it ``stdin`` to its end, and wait for it.

        Args:
            argv: program and arguments, not quoted.
            stdin: all that the command reads.
            deadline_s: seconds after which it is given up.

        Raises:
            UnreachableError: the way to the node broke, or the deadline passed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the node; may be called twice."""


def cut(name: str) -> UnreachableError:
    """Return the error for a connection that broke while a command was running."""
    return UnreachableError(
        f"The connection to {name} was cut before the answer came.",
        advice="What ran on the node may have finished there all the same; the next command will tell.",
        where=name,
    )


def silent(name: str, deadline_s: float) -> UnreachableError:
    """Return the error for a node that did not answer in time."""
    return UnreachableError(
        f"{name} did not answer within {deadline_s:.0f} s.",
        advice="What runs on the node may still finish there; the next command will tell.",
        where=name,
    )
