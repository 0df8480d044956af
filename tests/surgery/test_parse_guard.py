"""The child that parses: what a file does to it, really done, becomes an answer, and nothing of it is left behind."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import Found, GraftSpec, Unparsable, graft, guard, locate
from surgeon.surgery.places import EXPERTS
from tests.support.wheels import member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = b"def select_experts(hidden_states, router_logits, top_k):\n    topk_weights, topk_ids = leaf(router_logits)\n"
TAIL = b"    recorder().on_select_experts(topk_ids=topk_ids)\n    return topk_weights, topk_ids\n"
GOOD = HEAD + TAIL
SPEC = GraftSpec("oea", "0.1.0", "0123456789ab")
# Python compiles both. LibCST 1.9 overflows its stack on the first, and takes seconds over the second.
DEEP = HEAD + b"    x = 1" + b" and 1" * 20_000 + b"\n" + TAIL
SLOW = HEAD + b"    x = 1" + b" < 1" * 60_000 + b"\n" + TAIL


@pytest.fixture(name="guarded")
def _guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., guard.Guard]]:
    """Guards with limits of their own; afterwards no process, open descriptor or file of theirs is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    descriptors = len(os.listdir("/dev/fd"))  # noqa: PTH208 - the directory changes while it is read
    made: list[guard.Guard] = []
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)

    def make(**limits: float) -> guard.Guard:
        made.append(guard.Guard(guard.Limits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert [process.args for process in started if process.returncode is None] == []
    assert len(os.listdir("/dev/fd")) == descriptors  # noqa: PTH208 - same
    assert list(tmp_path.iterdir()) == []


def _is_whole(one: guard.Guard) -> None:
    """The next question is answered as if nothing had been."""
    site = one.ask("search", GOOD, EXPERTS)
    assert isinstance(site, Found)
    assert site.line == 3


def test_a_stack_that_overflows_is_an_answer(guarded: Callable[..., guard.Guard]) -> None:
    """Python compiles the file and LibCST's parser dies of it; the child did, by the signal that the answer names."""
    compile(DEEP, "topk.py", "exec")
    one = guarded()
    _is_whole(one)
    assert one._child is not None
    first = one._child._process
    answer = one.ask("search", DEEP, EXPERTS)
    assert isinstance(answer, Unparsable)
    assert "nested too deeply" in answer.reason
    assert "SIGSEGV" in answer.reason or "SIGBUS" in answer.reason
    assert first.returncode in {-signal.SIGSEGV, -signal.SIGBUS}
    _is_whole(one)


def test_a_crash_leaves_the_bytes_alone() -> None:
    """Through the public functions: the answer, the refusal that names the file untouched, and the same bytes."""
    source = bytes(bytearray(DEEP))
    assert isinstance(locate(source), Unparsable)
    with pytest.raises(DoesNotFitError, match=r"crashed.*The file was left as it is") as caught:
        graft(source, SPEC)
    assert caught.value.code == "unparsable"
    assert source == DEEP


@pytest.mark.parametrize(
    ("limits", "said"),
    [({"seconds": 0.5}, "0.5 s of processor time"), ({"patience": 0.5}, "0.5 s")],
)
def test_a_file_that_takes_too_long_is_an_answer(
    guarded: Callable[..., guard.Guard], limits: dict[str, float], said: str
) -> None:
    """The child is stopped in native code, where no Python of its own would get a turn."""
    one = guarded(**limits)
    answer = one.ask("search", SLOW, EXPERTS)
    assert isinstance(answer, Unparsable)
    assert answer.reason == f"LibCST did not get through it in {said} and was stopped."


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS enforces no limit of address space")
@pytest.mark.parametrize("source", [b"a(b)\n" * 60_000, b"x = [\n" + b"    1,\n" * 60_000 + b"]\n"])
def test_a_file_that_takes_too_much_memory_is_an_answer(guarded: Callable[..., guard.Guard], source: bytes) -> None:
    """Where Python's allocation fails or LibCST's aborts the process, the answer says that it is the memory."""
    one = guarded(memory=100 << 20, seconds=60)
    answer = one.ask("search", source, EXPERTS)
    assert isinstance(answer, Unparsable)
    assert "100 MiB of memory" in answer.reason or "memory on it" in answer.reason or "too long" in answer.reason
    _is_whole(one)


def test_a_file_beyond_all_measure_is_not_even_tried(guarded: Callable[..., guard.Guard]) -> None:
    """Five megabytes are no file of sglang's."""
    one = guarded()
    answer = one.ask("search", GOOD + b"# padding\n" * 500_000, EXPERTS)
    assert isinstance(answer, Unparsable)
    assert answer.reason == "It has 5,000,192 bytes; files of up to 4,000,000 are looked through."
    assert one._child is None


def test_a_child_killed_from_outside_is_an_answer(guarded: Callable[..., guard.Guard]) -> None:
    """As the kernel does it when memory runs out: the answer names the signal, and the next question is answered."""
    one = guarded()
    one._child = child = guard._Child(guard.Limits())
    os.kill(child._process.pid, signal.SIGKILL)
    with pytest.raises(guard._Ended, match=r"was killed \(SIGKILL\)"):
        child.ask(("search", GOOD, EXPERTS))
    # An idle child's end is not the file's fault, so a fresh one is asked.
    _is_whole(one)


def test_an_answer_that_is_none_is_an_answer(guarded: Callable[..., guard.Guard]) -> None:
    """A child that ends of its own accord says so with its exit code."""
    one = guarded()
    answer = one.ask("no-such-task", GOOD)
    assert isinstance(answer, Unparsable)
    assert answer.reason == "The process that read it ended with exit code 1."


@pytest.mark.parametrize("program", [None, "", "/no/such/python", "/bin/cat", "/bin/true"])
def test_without_a_python_to_start_the_file_is_read_here(
    guarded: Callable[..., guard.Guard], monkeypatch: pytest.MonkeyPatch, program: str | None
) -> None:
    """An embedded Python may not know its interpreter, or take its host for one; what might crash is then refused."""
    monkeypatch.setattr(sys, "executable", program)
    one = guarded(start=5)
    _is_whole(one)
    assert one._child is None
    answer = one.ask("search", DEEP, EXPERTS)
    assert isinstance(answer, Unparsable)
    assert (answer.line, "2,000 words and signs" in answer.reason) == (3, True)


def test_read_here_the_longest_statement_allowed_does_not_crash() -> None:
    """As many terms as the fallback lets through, tried in a process that may die of it, on a thread as it does."""
    code = (
        "from surgeon.surgery import guard, places\n"
        "for sign in (b' and 1', b' + 1', b' < 1', b'.b', b'[0]', b' if 1 else 1', b'** 2'):\n"
        "    source = b'x = a' + sign * (1990 // len(sign.split() or [1]) // 3) + b'\\n'\n"
        "    guard.in_process('search', source, places.EXPERTS)\n"
        "print('whole')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=_with_path())
    assert (done.returncode, done.stdout) == (0, "whole\n")


def _with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.4.9", "0.5.23"])
def test_no_statement_of_sglangs_is_near_the_fallbacks_limit(version: str) -> None:
    """Without a child, sglang's own files are read all the same."""
    assert guard.long_statement(member(version)) is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="another process's standard error is reached by /proc")
def test_what_the_child_prints_fills_no_pipe(guarded: Callable[..., guard.Guard]) -> None:
    """A panic of native code prints a page each time; after hundreds of them the child must not wait for a reader."""
    one = guarded()
    for _ in range(3):
        _is_whole(one)
        assert one._child is not None
        there = os.open(f"/proc/{one._child._process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        try:
            assert os.write(there, b"panicked\n" * 6000) == 54_000
        finally:
            os.close(there)
    _is_whole(one)


def test_whether_a_file_can_be_read_is_told_alone() -> None:
    """For a result of surgery whose syntax this Python does not know."""
    assert guard.unreadable(GOOD) is None
    assert isinstance(guard.unreadable(b"def f(:\n"), Unparsable)
    assert isinstance(guard.unreadable(DEEP), Unparsable)


def test_ctrl_c_ends_the_child_that_was_asked(guarded: Callable[..., guard.Guard]) -> None:
    """The interrupt goes through, and its child does not go on by itself."""
    one = guarded()
    _is_whole(one)
    assert one._child is not None
    child = one._child._process

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            one.ask("search", SLOW, EXPERTS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert child.returncode == -signal.SIGKILL
    assert one._child is None


@pytest.mark.parametrize("busy", [False, True])
def test_a_child_whose_parent_was_killed_ends_by_itself(tmp_path: Path, *, busy: bool) -> None:
    """Idle it ends with its socket; busy in native code the kernel ends it after the time it was given."""
    code = (
        "import sys\n"
        "from surgeon.surgery import guard, places\n"
        "one = guard._Child(guard.Limits(seconds=2))\n"
        "print(one._process.pid, flush=True)\n"
        "if len(sys.argv) > 1:\n"
        "    one.ask(('search', open(sys.argv[1], 'rb').read(), places.EXPERTS))\n"
        "input()\n"
    )
    slow = tmp_path / "slow.py"
    slow.write_bytes(SLOW.replace(b" < 1", b" < 1" * 5))
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *([str(slow)] if busy else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_with_path(),
    )
    assert parent.stdout is not None
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.5)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < deadline, "the child goes on though nobody asks it"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # Where nobody reaps orphans, what is left of one is a zombie.
    return not stat.exists() or stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def test_a_forked_process_starts_a_child_of_its_own() -> None:
    """Two processes over one socket would read each other's answers."""
    assert isinstance(guard.search(GOOD, EXPERTS), Found)
    assert guard._shared._child is not None
    ours = guard._shared._child._process.pid
    read, write = os.pipe()
    forked = os.fork()
    if not forked:
        site = guard.search(GOOD, EXPERTS)
        child = guard._shared._child
        os.write(write, pickle.dumps((getattr(site, "line", None), child and child._process.pid)))
        guard._shared.close()
        os._exit(0)
    os.waitpid(forked, 0)
    line, theirs = pickle.loads(os.read(read, 4096))  # noqa: S301 - from the fork above
    os.close(read)
    os.close(write)
    assert line == 3
    assert theirs not in {None, ours}
    assert isinstance(guard.search(GOOD + b"\n", EXPERTS), Found)
    assert guard._shared._child._process.pid == ours


@pytest.mark.wheels
def test_the_longest_topk_is_searched_quickly_all_included(guarded: Callable[..., guard.Guard]) -> None:
    """Starting the child, importing LibCST and searching 3,200 lines, in processor time: others may be busy."""
    source = member("0.5.23")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    one = guarded()
    assert isinstance(one.ask("search", source, EXPERTS), Found)
    one.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
