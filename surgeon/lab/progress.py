"""What the lab tells its observer while it works: steps that take time, and notes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class Progress(Protocol):
    """Somebody who follows what the lab does; the command line's output sink is one."""

    def note(self, text: str, /) -> None:
        """Take note of a fact, such as where torch comes from."""

    def step(self, title: str, /) -> AbstractContextManager[object]:
        """Follow a step from its beginning to its end."""


class Silent:
    """For library users: nothing is shown."""

    def note(self, text: str, /) -> None:
        """Show nothing."""

    @contextlib.contextmanager
    def step(self, _title: str, /) -> Iterator[None]:
        """Show nothing.

        Yields:
            Nothing.
        """
        yield
