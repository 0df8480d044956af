"""Has LibCST read and search a file in a child process, so that no file can hang, swell or crash surgeon.

Python's own parser refuses in good order what it cannot read. LibCST's native one does not: where code is nested deeply
it overflows its stack, which ends the process, and it does so on code that Python compiles (``1 and 1 and ...``, from
4,000 to 8,000 terms on); other code takes it minutes, or gigabytes. No check beforehand knows all of that, so every
file that has to be searched goes to the child, and what becomes of the child becomes an answer.

That costs next to nothing where a command looks at one file, the usual case: LibCST is imported once either way, in the
child instead of here. The child is kept for the files to come and ends with this process.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import tokenize
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgeon.surgery.outcomes import Unparsable

if TYPE_CHECKING:
    from surgeon.surgery.outcomes import Ambiguous, Found, NotFound
    from surgeon.surgery.places import Place

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from surgeon.surgery.guarded import main; main(int(sys.argv[1]))"
_LENGTH = 8
# How much longer than its limit a child may go on by itself where nobody is left to stop it, in seconds.
GRACE = 5
_TOKENS = 2_000
_STACK = 64 << 20


@dataclass(frozen=True)
class Limits:
    """What one file may take.

    sglang's longest topk.py so far (0.5.23) has 127,176 bytes; on one core LibCST takes 0.5 s and 40 MB for it.

    Attributes:
        seconds: of processor time, for reading and searching; a busy machine does not make a file unreadable.
        patience: seconds of wall time for the same.
        memory: bytes of address space of the child. macOS does not enforce it; there `size` stands in for it.
        size: bytes of the file.
        start: seconds until the child has imported LibCST.
    """

    seconds: float = 20
    patience: float = 180
    memory: int = 1 << 30
    size: int = 4_000_000
    start: float = 60


def search(source: bytes, place: Place) -> Found | NotFound | Ambiguous | Unparsable:
    """As :func:`surgeon.surgery.search.search`, in the child.

    Args:
        source: the file as it is on the node.
        place: which place to look for.

    Returns:
        What is there; `Unparsable` also where the child was stopped or ended, with how. Nothing that a file can hold
        makes it raise.
    """
    answer: Found | NotFound | Ambiguous | Unparsable = _shared.ask("search", source, place)
    return answer


def unreadable(source: bytes) -> Unparsable | None:
    """Whether LibCST can read a file at all, tried in the child.

    Args:
        source: the file.

    Returns:
        Why not, or None if it can.
    """
    answer: Unparsable | None = _shared.ask("unreadable", source)
    return answer


class _CannotStart(Exception):  # noqa: N818 - the caller then does without a child
    """No child can be had: there is no interpreter to start, or it does not come up."""


class _Ended(Exception):  # noqa: N818 - becomes an answer
    """The child is gone.

    Attributes:
        reason: how, in a sentence.
        stopped: because it took too long.
    """

    def __init__(self, reason: str, *, stopped: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stopped = stopped


class Guard:
    """One child at a time, started when it is first asked, and again after it has ended."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._impossible = False

    def ask(self, task: str, source: bytes, *more: object) -> Any:
        """Have one of :data:`surgeon.surgery.guarded.TASKS` done.

        Args:
            task: its name.
            source: the file.
            more: further arguments; they must pickle.

        Returns:
            What it returns, or `Unparsable`.
        """
        if len(source) > self._limits.size:
            return Unparsable(
                f"It has {len(source):,} bytes; files of up to {self._limits.size:,} are looked through.", None, ""
            )
        with self._lock:
            if not self._impossible:
                try:
                    return self._ask((task, source, *more))
                except _CannotStart:
                    self._impossible = True
                except _Ended as ended:
                    return Unparsable(ended.reason, None, "")
        return in_process(task, source, *more)

    def _ask(self, request: tuple[object, ...]) -> Any:
        fresh = self._child is None
        try:
            return self._try(request)
        except _Ended as ended:
            if fresh or ended.stopped:
                raise
        # A child that has been in use may have ended for reasons of its own, so only a fresh one's end is the file's.
        return self._try(request)

    def _try(self, request: tuple[object, ...]) -> Any:
        if self._child is None:
            self._child = _Child(self._limits)
        try:
            return self._child.ask(request)
        except BaseException:
            # Also on Ctrl-C: an answer that nobody waits for would be taken for that of the next question.
            self.close()
            raise

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def forget(self) -> None:
        """In a process that was forked off: leave the child to the process that started it."""
        self._lock = threading.Lock()
        child, self._child = self._child, None
        if child is not None:
            child.leave()


class _Child:
    """A Python process that answers questions over a socket, which is its standard input."""

    def __init__(self, limits: Limits) -> None:
        if not sys.executable:
            raise _CannotStart
        self._limits = limits
        self._socket, theirs = socket.socketpair()
        flags = ["-I", "-S", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
        command = [sys.executable, *flags, "-c", _BOOT, str(limits.memory), *_path()]
        try:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, close_fds=True
            )
        except OSError as error:
            self._socket.close()
            raise _CannotStart from error
        finally:
            theirs.close()
        assert self._process.stderr is not None  # noqa: S101 - for the type checker: it was asked for above
        self._words = self._process.stderr
        os.set_blocking(self._words.fileno(), False)
        try:
            ready = self._receive(time.monotonic() + limits.start) == "ready"
        except BaseException as error:
            self.end()
            if isinstance(error, _Ended):
                raise _CannotStart from error
            raise
        if not ready:
            self.end()
            raise _CannotStart

    def ask(self, request: tuple[object, ...]) -> Any:
        """Send a question and wait for the answer.

        Raises:
            _Ended: there was none within the limits.
        """
        deadline = time.monotonic() + self._limits.patience
        body = pickle.dumps((self._limits.seconds, self._limits.patience + GRACE, *request))
        try:
            self._socket.settimeout(self._limits.patience)
            self._socket.sendall(len(body).to_bytes(_LENGTH, "big") + body)
        except TimeoutError as error:
            raise self._too_slow(self._limits.patience) from error
        except OSError as error:
            raise self._how() from error
        answer = self._receive(deadline)
        # A panic of the native parser writes to standard error; left there, it would fill the pipe one day.
        self._words.read()
        return answer

    def _receive(self, deadline: float) -> Any:
        length = int.from_bytes(self._read(_LENGTH, deadline), "big")
        try:
            # The bytes come from a process that this one has started, over a socket that no other has.
            return pickle.loads(self._read(length, deadline))  # noqa: S301 - said above
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
            raise _Ended(f"The process that read it gave no answer that makes sense: {error}") from error

    def _read(self, count: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < count:
            # A timeout of zero would mean not to wait at all, which is another error.
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                some = self._socket.recv(count - len(got))
            except TimeoutError as error:
                raise self._too_slow(self._limits.patience) from error
            except OSError as error:
                raise self._how() from error
            if not some:
                raise self._how()
            got += some
        return bytes(got)

    @staticmethod
    def _too_slow(seconds: float, kind: str = "") -> _Ended:
        return _Ended(f"LibCST did not get through it in {seconds:g} s{kind} and was stopped.", stopped=True)

    def _how(self) -> _Ended:
        """Say how the child ended; its socket is closed, so it has."""
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return _Ended("The process that read it stopped answering.")
        if code == -signal.SIGPROF:
            return self._too_slow(self._limits.seconds, " of processor time")
        words = self._words.read() or b""
        if b"memory allocation of" in words or b"MemoryError" in words:
            return _Ended(f"Reading it takes more than {self._limits.memory >> 20:,} MiB of memory.")
        if code in {-signal.SIGSEGV, -signal.SIGBUS}:
            name = signal.Signals(-code).name
            return _Ended(f"LibCST's parser crashed on it ({name}), as it does on code that is nested too deeply.")
        if code < 0:
            with suppress(ValueError):
                return _Ended(f"The process that read it was killed ({signal.Signals(-code).name}).")
        return _Ended(f"The process that read it ended with exit code {code}.")

    def end(self) -> None:
        """Stop it, and wait until it is gone."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._words.close()

    def leave(self) -> None:
        """Close this process's share of it."""
        self._socket.close()
        self._words.close()
        # So that it is not taken for a child of this process that was forgotten.
        self._process.returncode = 0


def _path() -> list[str]:
    """Where the child imports from: as this process does, and certainly surgeon and LibCST, however they came here."""
    path = [entry for entry in sys.path if entry and Path(entry).is_absolute()]
    for package in ("surgeon", "libcst"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            path.append(str(Path(spec.origin).resolve().parent.parent))
    return list(dict.fromkeys(path))


def in_process(task: str, source: bytes, *more: object) -> Any:
    """Do a task without a child, where none can be had: in an embedded Python, or where no process may be started.

    It is refused where a statement is so long that LibCST's parser might overflow the stack, which is made large.

    Args:
        task: as for `Guard.ask`.
        source: the file.
        more: further arguments.
    """
    from surgeon.surgery.guarded import TASKS

    line = long_statement(source)
    if line is not None:
        return Unparsable(
            f"The statement that ends in line {line} has more than {_TOKENS:,} words and signs, which LibCST might "
            "crash on; no process could be started to try it in.",
            line,
            "",
        )
    outcome: list[Any] = [Unparsable("There is not memory enough to read it.", None, "")]

    def work() -> None:
        with suppress(MemoryError):
            outcome[0] = TASKS[task](source, *more)

    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return outcome[0]


def long_statement(source: bytes) -> int | None:
    """Whether a statement has more tokens than any that people write; sglang's longest has some hundreds.

    Args:
        source: the file.

    Returns:
        The line where its limit is passed, counted from 1; None if there is no such statement, or Python's tokenizer
        does not get so far.
    """
    count = 0
    with suppress(tokenize.TokenError, SyntaxError, ValueError):
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            count = 0 if token.type == tokenize.NEWLINE else count + 1
            if count > _TOKENS:
                return token.start[0]
    return None


_shared = Guard()
atexit.register(_shared.close)
os.register_at_fork(after_in_child=_shared.forget)
