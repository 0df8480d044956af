"""The child that reads and searches files for `guard`: one question after the other, until its input closes."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from surgeon.surgery.outcomes import Unparsable
from surgeon.surgery.parse import parse
from surgeon.surgery.search import search

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LENGTH = 8
_CHANNEL = 0


def unreadable(source: bytes) -> Unparsable | None:
    """Why LibCST cannot read a file, or None if it can.

    Args:
        source: the file.
    """
    parsed = parse(source)
    return parsed if isinstance(parsed, Unparsable) else None


TASKS: Mapping[str, Callable[..., Any]] = {"search": search, "unreadable": unreadable}


def main(memory: int) -> None:
    """Answer questions.

    Each is ended by the kernel after the times that it names, of the processor and of the wall, even if the parser
    never comes back from native code and the process that asked is gone.

    Args:
        memory: bytes of address space to do with.
    """
    # Ctrl-C in a terminal reaches the whole group; the process that asked decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    _send("ready")
    while (head := _read(_LENGTH)) is not None:
        body = _read(int.from_bytes(head, "big"))
        if body is None:
            return
        # From the process that started this one.
        seconds, patience, task, *arguments = pickle.loads(body)  # noqa: S301 - said above
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, patience)
        answer = TASKS[task](*arguments)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        parse.cache_clear()
        _send(answer)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    # macOS refuses a limit of address space.
    with suppress(ValueError, OSError):
        resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read(count: int) -> bytes | None:
    """That many bytes, or None if the other side is gone."""
    parts = bytearray()
    while len(parts) < count:
        some = os.read(_CHANNEL, min(count - len(parts), 1 << 20))
        if not some:
            return None
        parts += some
    return bytes(parts)


def _send(answer: object) -> None:
    body = pickle.dumps(answer)
    view = memoryview(len(body).to_bytes(_LENGTH, "big") + body)
    while view:
        view = view[os.write(_CHANNEL, view) :]
