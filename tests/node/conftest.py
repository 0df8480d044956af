"""SSH servers for the tests of the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.ssh import asyncssh_node, openssh_node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.ssh import SshNode


@pytest.fixture
def openssh(tmp_path: Path) -> Iterator[SshNode]:
    """OpenSSH's sshd on the loopback."""
    with openssh_node(tmp_path / "ssh") as node:
        yield node


@pytest.fixture(params=["openssh", "asyncssh"])
def ssh_node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SshNode]:
    """Two implementations of the protocol, one after the other."""
    start = openssh_node if request.param == "openssh" else asyncssh_node
    with start(tmp_path / "ssh") as node:
        yield node
