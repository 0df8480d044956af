"""One surgeon at a time, nobody locked out for ever, and a ledger that survives a crash."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from surgeon.node.agent import ledger
from surgeon.node.agent.protocol import AgentError
from tests.support.installation import Installation

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path) -> Installation:
    """A small package that nobody works on yet."""
    return Installation.make(tmp_path)


def test_a_lease_says_whose_it_is_and_until_when(package: Installation) -> None:
    """Owner, host, process and expiry are there for others to read."""
    token = package.acquire(owner="ann", host="desk", pid=42, ttl_s=60)
    lease = package.call("ledger")["lease"]
    assert (lease["token"], lease["owner"], lease["host"], lease["pid"]) == (token, "ann", "desk", 42)
    assert 0 < lease["expires"] - time.time() <= 60
    assert lease["expired"] is False
    assert (package.folder / "lease.json").stat().st_mode & 0o777 == 0o600


def test_a_second_surgeon_is_told_who_holds_the_lease(package: Installation) -> None:
    """The refusal names the holder and the way out."""
    package.acquire(owner="ann", host="desk", pid=42)
    package.context.lease = None
    with pytest.raises(AgentError, match=r"ann on desk \(pid 42\)") as raised:
        package.acquire(owner="bob")
    assert raised.value.code == "locked"
    assert "--break-lock" in raised.value.advice


def test_the_holder_may_ask_again(package: Installation) -> None:
    """Acquiring what one holds renews it and keeps the token."""
    token = package.acquire(ttl_s=60)
    assert package.acquire() == token


def test_an_expired_lease_is_taken_over(package: Installation) -> None:
    """Nobody is locked out for ever; the one who was there before is named."""
    package.acquire(owner="ann", ttl_s=0.01)
    package.context.lease = None
    time.sleep(0.02)
    taken = package.call("lease", action="acquire", owner="bob", host="h", pid=2, ttl_s=60)
    assert (taken["owner"], taken["took_over"]["owner"], taken["took_over"]["expired"]) == ("bob", "ann", True)


def test_a_lease_whose_holder_is_known_to_be_dead_is_taken_over_by_its_token(package: Installation) -> None:
    """Only who has seen the very lease may call it dead."""
    token = package.acquire(owner="ann")
    package.context.lease = None
    with pytest.raises(AgentError, match="ann"):
        package.call("lease", action="acquire", owner="bob", dead=True, token="another")  # noqa: S106 - not a secret
    taken = package.call("lease", action="acquire", owner="bob", dead=True, token=token)
    assert taken["took_over"]["token"] == token


def test_breaking_says_whose_lease_was_broken_and_locks_the_other_out(package: Installation) -> None:
    """The one whose lease was broken cannot write on."""
    token = package.acquire(owner="ann")
    broken = package.call("lease", action="break", owner="bob", host="h", pid=2, ttl_s=60)
    assert broken["broke"]["owner"] == "ann"
    package.context.lease = token
    with pytest.raises(AgentError, match="bob on h"):
        package.commit()
    assert package.is_original()


def test_a_released_lease_is_gone_and_only_the_holder_releases_it(package: Installation) -> None:
    """A stale token releases nothing."""
    token = package.acquire()
    package.context.lease = "stale"
    assert package.call("lease", action="release") == {"released": False}
    package.context.lease = token
    assert package.call("lease", action="release") == {"released": True}
    assert package.call("ledger")["lease"] is None
    with pytest.raises(AgentError, match="which nobody holds"):
        package.call("lease", action="renew")


def test_a_renewal_for_a_long_wait_reaches_as_far_as_it_asks(package: Installation) -> None:
    """A benchmark of a quarter of an hour must not look abandoned; the change after it counts from then again."""
    package.acquire(ttl_s=60)
    long = package.call("lease", action="renew", ttl_s=900)
    assert long["expires"] == pytest.approx(time.time() + 900, abs=10)
    assert package.call("lease", action="renew")["expires"] == pytest.approx(time.time() + 60, abs=10)


def test_each_change_extends_the_lease(package: Installation) -> None:
    """A long operation does not lose its lease while it works."""
    package.acquire(ttl_s=60)
    path = package.folder / "lease.json"
    lease = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**lease, "expires": time.time() + 1}), "utf-8")
    package.commit()
    assert package.call("ledger")["lease"]["expires"] > time.time() + 50


def test_a_line_cut_by_a_crash_is_reported_and_loses_no_other(package: Installation) -> None:
    """The torn line is told of with its number; what comes after it is read."""
    package.acquire()
    package.commit()
    path = package.folder / "ledger.jsonl"
    with path.open("ab") as file:
        file.write(b'{"revision": 2, "status": "pend')
    package.call("finish", revision=1, status="applied")
    package.restore()
    found = package.call("ledger")
    assert [(record["revision"], record["status"]) for record in found["records"]] == [(1, "applied"), (2, "pending")]
    assert found["torn"] == [{"line": 2, "text": '{"revision": 2, "status": "pend'}]


@pytest.mark.parametrize("line", [b"[]", b"3", b'{"revision": "x"}', b'{"status": "applied"}', b"\xff\xfe"])
def test_a_line_that_is_no_record_is_torn(package: Installation, line: bytes) -> None:
    """Anything that is not a record is reported, never an exception."""
    package.acquire()
    package.commit()
    with (package.folder / "ledger.jsonl").open("ab") as file:
        file.write(line + b"\n")
    found = package.call("ledger")
    assert [record["revision"] for record in found["records"]] == [1]
    assert [torn["line"] for torn in found["torn"]] == [2]


def test_a_site_that_was_never_touched_has_an_empty_ledger_and_no_folder(package: Installation) -> None:
    """Looking writes nothing."""
    assert package.call("ledger") == {"records": [], "lease": None, "torn": []}
    assert not package.folder.exists()


@pytest.mark.parametrize("site", ["", "../../etc", "0" * 11, "0" * 12 + "\n"])
def test_a_site_id_that_is_none_is_refused(package: Installation, site: str) -> None:
    """No path is built from what is not a short name."""
    with pytest.raises(AgentError, match="12 hex digits") as raised:
        package.call("ledger", site_id=site)
    assert raised.value.code == "usage"


def test_two_agents_do_not_write_at_once(package: Installation) -> None:
    """A second agent waits for the first one's lock, and gives up in words before its deadline."""
    package.acquire()
    descriptor = os.open(package.folder / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = threading.Timer(0.3, os.close, [descriptor])
    waiting.start()
    began = time.monotonic()
    package.commit()
    assert time.monotonic() - began > 0.25
    waiting.join()
    descriptor = os.open(package.folder / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    package.context.deadline = time.monotonic() + 1.2
    from surgeon.node.agent.__main__ import perform

    with pytest.raises(AgentError, match="at work on this installation") as raised:
        perform("finish", {"site_id": package.site, "revision": 1, "status": "failed"}, package.context)
    assert raised.value.code == "locked"
    os.close(descriptor)


def test_state_is_private(package: Installation) -> None:
    """Folders are 0700, files 0600."""
    package.acquire()
    package.commit()
    for path in package.folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_link_in_place_of_the_ledger_is_not_written_through(package: Installation) -> None:
    """Nobody can have the agent append to another file."""
    package.acquire()
    victim = package.root / "victim"
    victim.write_bytes(b"precious\n")
    (package.folder / "ledger.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        ledger.append(str(package.folder), {"revision": 1})
    with pytest.raises(AgentError, match="Cannot read the ledger"):
        package.call("ledger")
    assert victim.read_bytes() == b"precious\n"
