"""Who is told how a story goes: progress for people, nothing for programs that call operations."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Observer(Protocol):
    """Told of steps as they begin and end, and of what is worth knowing on the way."""

    def step(self, title: str) -> AbstractContextManager[Step]:
        """A step that takes a while; leaving it by an exception marks it failed."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def warn(self, text: str) -> None:
        """Something that may bite."""


class Step(Protocol):
    """A running step."""

    def progress(self, text: str) -> None:
        """What it is doing now; replaces what was said before."""

    def done(self, text: str) -> None:
        """What came out of it, for the line that stays."""

    def failed(self, text: str) -> None:
        """It did not hold, and why; the story goes on."""


class Silent:
    """Tells nobody."""

    @contextmanager
    def step(self, title: str) -> Iterator[Silent]:
        """A step that nobody watches."""
        del title
        yield self

    def note(self, text: str) -> None:
        """Drop it."""

    def warn(self, text: str) -> None:
        """Drop it."""

    def progress(self, text: str) -> None:
        """Drop it."""

    def done(self, text: str) -> None:
        """Drop it."""

    def failed(self, text: str) -> None:
        """Drop it."""
