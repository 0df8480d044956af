"""A real index behind a real HTTP server, asked with the real pip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from surgeon.registry import index as registry
from surgeon.registry import wheels

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.local_index import LocalIndex


def of(served: LocalIndex) -> registry.Index:
    """The index, as a node names it."""
    return registry.named(served.url, "PIP_INDEX_URL")


def test_releases_and_wheels_come_from_the_index_that_is_named(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch, unset: Path
) -> None:
    """The newest first and no candidates; nothing that this machine's own settings name is mixed in."""
    for version in ("0.5.9", "0.5.10", "0.5.9.post1", "0.6.0rc1", "0.6.0.dev3"):
        index.add(version, version.encode())
    shelf = unset / "shelf"
    shelf.mkdir()
    (shelf / "sglang-99.0-py3-none-any.whl").write_bytes(b"")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert [str(one) for one in registry.releases(of(index))] == ["0.5.10", "0.5.9.post1", "0.5.9"]
    wheel = wheels.fetch_from(of(index), "0.5.10")
    # Kept apart from what the lab installs from.
    assert wheel.parent.parent == wheels.folder()
    assert wheels.cached("0.5.10") is None
    asked = len(index.asked)
    assert wheels.fetch_from(of(index), "0.5.10") == wheel
    assert len(index.asked) == asked


def test_this_machine_s_own_credentials_open_its_index(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used where a node names the same index, and never shown."""
    index.add("0.5.9", b"")
    index.credentials = "me:hush"
    with pytest.raises(registry.RegistryError, match="credentials that this machine does not have"):
        registry.releases(of(index))
    monkeypatch.setenv("PIP_INDEX_URL", index.with_credentials())
    mine = of(index)
    assert mine.own
    assert mine.shown == index.url
    assert [str(one) for one in registry.releases(mine)] == ["0.5.9"]
    index.status = 503
    with pytest.raises(registry.RegistryError) as failed:
        registry.releases(mine)
    assert "hush" not in f"{failed.value.message} {failed.value.advice} {failed.value.where}"


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "has no sglang"), (403, "credentials"), (500, "server error")], ids=str
)
def test_a_refusal_is_told_in_plain_words(index: LocalIndex, status: int, reason: str) -> None:
    """With the address, and what to look at."""
    index.status = status
    with pytest.raises(registry.RegistryError, match=reason) as failed:
        registry.releases(of(index))
    assert failed.value.message.startswith(index.url)
    assert failed.value.advice


def test_an_index_that_keeps_one_waiting_is_given_up(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that pip is given for a socket, twice."""
    monkeypatch.setattr(registry, "_SOCKET_TIMEOUT_S", 0.3)
    index.wait_s = 3.0
    with pytest.raises(registry.RegistryError, match="did not answer in time"):
        registry.releases(of(index))


def test_nobody_there_is_told() -> None:
    """Nothing listens on the discard port."""
    with pytest.raises(registry.RegistryError, match="connection was refused"):
        registry.releases(registry.named("http://127.0.0.1:9/simple", ""))


@pytest.mark.parametrize("url", ["file:///srv/simple", "--extra-index-url=x", "ftp://host/simple", "https://"])
def test_an_address_that_means_something_else_here_is_refused(url: str) -> None:
    """A node's word never becomes an option, or a path of this machine."""
    with pytest.raises(registry.RegistryError, match="expected an address that begins with https"):
        registry.named(url, "")


def test_a_machine_told_to_use_no_index_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to set."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(registry.RegistryError, match="no index") as refused:
        registry.own()
    assert "PIP_INDEX_URL" in refused.value.advice
