"""One verb, one round trip: what is sent, what comes back, and what is said when it does not."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surgeon.errors import ForeignEditError, LockedError, SurgeonError, UnreachableError, UsageError
from surgeon.node import client
from surgeon.node.client import connect, unframe
from surgeon.node.target import Target
from tests.support.ssh import openssh_node

if TYPE_CHECKING:
    from tests.support.ssh import SshNode

SITE = {"site_id": "0" * 12}


@pytest.fixture
def local(tmp_path: Path) -> Target:
    """This machine, with a state directory of its own."""
    return Target("local", state_dir=str(tmp_path / "state"))


def script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
    path.chmod(0o755)
    return path


def test_the_agent_is_sent_once_and_then_each_verb_is_one_round_trip(ssh_node: SshNode) -> None:
    """Two commands the first time, one each time after, also on a new connection."""
    with connect(ssh_node.target) as node:
        node.call("ledger", SITE)
        assert node.transport.round_trips == 2
        node.call("ledger", SITE)
        assert node.transport.round_trips == 3
    with connect(ssh_node.target) as node:
        node.call("ledger", SITE)
        assert node.transport.round_trips == 1


def test_large_payloads_go_both_ways_at_once(ssh_node: SshNode) -> None:
    """Megabytes up and down neither deadlock nor change."""
    data = os.urandom(3 << 20)
    big = ssh_node.folder / "big"
    big.write_bytes(data)
    with connect(ssh_node.target) as node:
        answer = node.call("read", {"path": str(big), "max_bytes": len(data), "ballast": "x" * (3 << 20)})
    assert base64.b64decode(answer["b64"]) == data
    assert answer["sha256"] == hashlib.sha256(data).hexdigest()


def test_noise_from_start_up_files_does_no_harm(openssh: SshNode) -> None:
    """What a .bashrc prints, before and after, on either stream, is not taken for the answer."""
    noise = 'echo "Welcome é surgeon-answer 12 {}"; echo oops >&2; trap "echo bye" EXIT\n'
    (openssh.home / ".bashrc").write_text(noise, "utf-8")
    with connect(openssh.target) as node:
        completed = node.transport.run(["echo", "hello"], stdin=b"", deadline_s=10)
        answer = node.call("ledger", SITE)
    # Otherwise the login shell reads no .bashrc here, and the test would pass for the wrong reason.
    assert b"Welcome" in completed.stdout
    assert answer["records"] == []


@pytest.mark.parametrize("locale", ["C", "zh_CN.GBK", "en_US.ISO-8859-1"])
def test_names_outside_ascii_survive_any_locale(tmp_path: Path, locale: str) -> None:
    """A path and a text in UTF-8 arrive as they are, whatever the node's locale."""
    with openssh_node(tmp_path / "ssh", options=(f"SetEnv HOME={tmp_path} LC_ALL={locale}",)) as node:
        path = node.folder / "模型-é"
        path.write_bytes("naïve 路由".encode())
        target = replace(node.target, state_dir=str(node.folder / "état"))
        with connect(target) as opened:
            answer = opened.call("read", {"path": str(path)})
        assert base64.b64decode(answer["b64"]).decode() == "naïve 路由"
        assert (node.folder / "état" / "agent").is_dir()


@pytest.mark.parametrize("shell", ["bash", "dash", "zsh", "fish", "tcsh"])
def test_the_command_reads_the_same_in_every_login_shell(local: Target, shell: str) -> None:
    """The one quoted command line is understood by whatever shell the user has there."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    with connect(local) as node:
        run = node.transport.run

        def through_the_shell(argv: list[str], *, stdin: bytes, deadline_s: float) -> object:
            import shlex

            return run([program, "-c", shlex.join(argv)], stdin=stdin, deadline_s=deadline_s)

        node.transport.run = through_the_shell  # type: ignore[method-assign, assignment]
        assert node.call("ledger", SITE)["records"] == []


def test_a_tampered_agent_is_replaced_and_never_run(local: Target) -> None:
    """The cached agent is run only if it is what its name says; else it is sent again."""
    with connect(local) as node:
        node.call("ledger", SITE)
        (cached,) = Path(local.state_dir or "", "agent").iterdir()
        good, marker = cached.read_bytes(), cached.with_name("marker")
        cached.write_bytes(b"import pathlib\n" + b"pathlib.Path(%r).touch()\n" % str(marker).encode() + good)
        node.call("ledger", SITE)
        assert node.transport.round_trips == 4
    assert cached.read_bytes() == good
    assert not marker.exists()


def test_a_link_in_place_of_the_agent_is_not_followed(local: Target, tmp_path: Path) -> None:
    """Even a link to the right bytes is replaced by the file."""
    with connect(local) as node:
        node.call("ledger", SITE)
        (cached,) = Path(local.state_dir or "", "agent").iterdir()
        cached.rename(tmp_path / "elsewhere")
        cached.symlink_to(tmp_path / "elsewhere")
        node.call("ledger", SITE)
    assert not cached.is_symlink()


def test_no_python_on_the_node_says_what_was_tried(openssh: SshNode) -> None:
    """A node without Python is said to be one, with the names that were looked for."""
    target = replace(openssh.target, node_python="/nonexistent/python3")
    with connect(target) as node, pytest.raises(UnreachableError, match=r"no Python 3\.8 or later on node") as raised:
        node.call("ledger", SITE)
    assert "/nonexistent/python3" in raised.value.message
    assert "node_python" in raised.value.advice


def test_an_old_python_is_passed_over(local: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python 2, or a python3 that is a stub which cannot start, does not stop the search."""
    old = shutil.which("python2.7") or str(script(tmp_path / "old", "exit 2"))
    stub = str(script(tmp_path / "stub", "echo 'command not found' >&2; exit 127"))
    monkeypatch.setattr(client, "INTERPRETERS", (old, stub, "python3"))
    monkeypatch.setattr("sys.executable", old)
    with connect(local) as node:
        assert node.call("ledger", SITE)["records"] == []


def test_the_agents_refusal_becomes_the_class_of_its_code(local: Target, tmp_path: Path) -> None:
    """Codes are classes, so that the exit code is right; words and place come through."""
    with connect(local) as node:
        with pytest.raises(UsageError, match="no verb 'sing'"):
            node.call("sing")
        with pytest.raises(LockedError, match="needs the lease"):
            node.call("commit", {**SITE, "files": []})
        node.lease = node.call("lease", {**SITE, "action": "acquire", "owner": "me", "host": "h", "pid": 1})["token"]
        path = tmp_path / "topk.py"
        path.write_text("x = 1\n", "utf-8")
        change = {"path": str(path), "b64": "", "expect": "0" * 64}
        with pytest.raises(ForeignEditError, match="Somebody else changed") as raised:
            node.call("commit", {**SITE, "files": [change], "interpreter": None})
    assert raised.value.where == str(path)
    assert raised.value.advice


def test_the_agent_keeps_the_deadline_and_kills_what_it_started(local: Target, tmp_path: Path) -> None:
    """A verb whose child hangs answers at the deadline, undone, and the child is gone."""
    pid_file = tmp_path / "pid"
    slow = script(tmp_path / "slow", f"echo $$ > {pid_file}; exec sleep 60")
    path = tmp_path / "topk.py"
    path.write_text("x = 1\n", "utf-8")
    began = time.monotonic()
    with connect(local) as node:
        node.lease = node.call("lease", {**SITE, "action": "acquire", "owner": "me", "host": "h", "pid": 1})["token"]
        with pytest.raises(SurgeonError, match="within its deadline of 1 s"):
            node.call("commit", commit_args(path, b"x = 2\n", str(slow)), deadline_s=1)
        assert time.monotonic() - began < 8
        (record,) = node.call("ledger", SITE)["records"]
    assert record["status"] == "failed"
    assert path.read_bytes() == b"x = 1\n"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["pid", "slow", "state", "topk.py"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text("utf-8")), 0)


def test_a_node_that_does_not_answer_is_given_up(ssh_node: SshNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has a deadline of its own, for when the agent's does not come through."""
    monkeypatch.setattr(client, "MARGIN_S", 0.5)
    deaf = script(ssh_node.folder / "deaf", "exec sleep 5")
    began = time.monotonic()
    target = replace(ssh_node.target, node_python=str(deaf))
    with connect(target) as node, pytest.raises(UnreachableError, match="did not answer within"):
        node.call("ledger", SITE, deadline_s=0.5)
    assert time.monotonic() - began < 4.5


def test_a_connection_cut_in_the_middle_of_a_verb_is_said_and_the_node_goes_on(openssh: SshNode) -> None:
    """The client hears that it cannot know; the node finishes, and the next command finds out."""
    started = openssh.folder / "started"
    slow = script(openssh.folder / "slow", f'touch {started}; sleep 1; exec python3 "$@"')
    path = openssh.folder / "topk.py"
    path.write_text("x = 1\n", "utf-8")

    def cut_when_started() -> None:
        limit = time.monotonic() + 20
        while not started.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        for session in openssh.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGKILL)

    with connect(openssh.target) as node:
        node.lease = node.call("lease", {**SITE, "action": "acquire", "owner": "me", "host": "h", "pid": 1})["token"]
        cutter = threading.Thread(target=cut_when_started)
        cutter.start()
        with pytest.raises(UnreachableError, match="was cut before the answer came") as raised:
            node.call("commit", commit_args(path, b"x = 2\n", str(slow)))
        cutter.join()
        assert "may have finished" in raised.value.advice
        assert path.read_bytes() == b"x = 1\n"
        with pytest.raises(UnreachableError, match="was cut"):
            node.call("ledger", SITE)
    limit = time.monotonic() + 10
    while path.read_bytes() == b"x = 1\n" and time.monotonic() < limit:
        time.sleep(0.05)
    with connect(openssh.target) as node:
        (record,) = node.call("ledger", SITE)["records"]
    assert record["status"] == "pending"
    assert record["files"][0]["after"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.read_bytes() == b"x = 2\n"


def test_an_answer_that_is_not_whole_is_none() -> None:
    """A frame cut short, or with another nonce, or quoted by a shell's trace, is not an answer."""
    whole = b'noise\n\nsurgeon-answer abc 11\n{"ok":true}\n'
    assert unframe(whole, "abc") == {"ok": True}
    assert unframe(whole[:-4], "abc") is None
    assert unframe(whole, "abd") is None
    assert unframe(b'+ echo surgeon-answer abc 11\n{"ok":true}\n', "abc") is None


def commit_args(path: Path, data: bytes, interpreter: str) -> dict[str, object]:
    """Ask for one file to be replaced by ``data``."""
    change = {
        "path": str(path),
        "b64": base64.b64encode(data).decode("ascii"),
        "expect": hashlib.sha256(path.read_bytes()).hexdigest(),
        "like": str(path),
    }
    return {**SITE, "record": {"kind": "apply"}, "files": [change], "interpreter": interpreter}
