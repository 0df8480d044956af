"""The errors that surgeon raises on purpose. Each knows its exit code, its code for ``--json`` and what to do next."""

from __future__ import annotations

from typing import ClassVar


class SurgeonError(Exception):
    """Root of every error that surgeon raises on purpose.

    Attributes:
        exit_code: what the process exits with; the list is the README's table.
        code: a stable word for programs that read ``--json``.
        message: what was expected and what was found.
        advice: what to do about it; may be empty.
        where: the file, host or field it is about; may be empty.
    """

    exit_code: ClassVar[int] = 1
    code: str = "failed"

    def __init__(self, message: str, *, advice: str = "", where: str = "", code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.where = where
        if code is not None:
            self.code = code


class UsageError(SurgeonError, ValueError):
    """What was typed, or written in a configuration file, makes no sense."""

    exit_code = 2
    code = "usage"


class UnreachableError(SurgeonError, ConnectionError):
    """The node cannot be reached, or does not let us in, or has no Python."""

    exit_code = 3
    code = "unreachable"


class DoesNotFitError(SurgeonError):
    """The patch does not fit what is installed, or could not take effect there."""

    exit_code = 4
    code = "does-not-fit"


class DriftError(SurgeonError):
    """The environment has drifted so that a restart would fail."""

    exit_code = 5
    code = "drift"


class GateFailedError(SurgeonError):
    """A gate failed after the write; the original bytes are back."""

    exit_code = 6
    code = "gate-failed"


class LockedError(SurgeonError):
    """Another surgeon holds the lease."""

    exit_code = 7
    code = "locked"


class ForeignEditError(SurgeonError):
    """Somebody else's edit is in the way."""

    exit_code = 8
    code = "foreign-edit"


class ChangesPendingError(SurgeonError):
    """``--dry-run --exit-code`` found changes to make."""

    exit_code = 10
    code = "changes-pending"


class RollbackFailedError(SurgeonError):
    """A gate failed and so did the rollback: a person must act."""

    exit_code = 11
    code = "rollback-failed"
