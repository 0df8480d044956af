"""What ``ssh -G`` says is taken as it is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.node.ssh_config import expand, parse, resolve
from surgeon.node.target import Target

TEXT = """host node
user ann
hostname 10.0.0.7
port 2222
stricthostkeychecking ask
userknownhostsfile ~/.ssh/known_hosts /etc/%n_hosts
globalknownhostsfile /etc/ssh/known
identityfile ~/.ssh/%r_key
identityfile /keys/%h.pub
identitiesonly yes
hashknownhosts yes
forwardagent yes
connecttimeout 7
"""


def test_every_keyword_that_matters_is_read() -> None:
    """Names, port, keys, known hosts and their tokens."""
    found = parse(TEXT, Target("node"))
    assert (found.hostname, found.port, found.user) == ("10.0.0.7", 2222, "ann")
    assert found.user_known_hosts == (Path.home() / ".ssh" / "known_hosts", Path("/etc/node_hosts"))
    assert found.global_known_hosts == (Path("/etc/ssh/known"),)
    assert found.identity_files == (Path.home() / ".ssh" / "ann_key", Path("/keys/10.0.0.7.pub"))
    assert found.identities_only
    assert found.hash_known_hosts
    assert found.forward_agent
    assert found.connect_timeout_s == 7
    assert not found.accept_new
    assert found.proxy is None
    assert found.proxy_shell is None


@pytest.mark.parametrize(
    ("extra", "name"),
    [("", "[10.0.0.7]:2222"), ("hostkeyalias gpu\n", "gpu"), ("hostkeyalias none\n", "[10.0.0.7]:2222")],
)
def test_the_name_of_a_hosts_key_is_the_one_openssh_writes(extra: str, name: str) -> None:
    """A port stands in brackets, an alias stands alone."""
    assert parse(TEXT + extra, Target("node")).known_as == name
    assert parse(TEXT.replace("2222", "22"), Target("node")).known_as == "10.0.0.7"


@pytest.mark.parametrize(
    ("jump", "words"),
    [
        ("bob@hop:22", ["-W", "[10.0.0.7]:2222", "--", "ssh://bob@hop:22"]),
        ("first,second", ["-J", "first", "-W", "[10.0.0.7]:2222", "--", "ssh://second"]),
        ("ssh://hop", ["-W", "[10.0.0.7]:2222", "--", "ssh://hop"]),
    ],
)
def test_jump_hosts_become_a_chain_of_ssh(jump: str, words: list[str]) -> None:
    """The last hop carries the connection; those before it are its own business. The configuration is the same."""
    target = Target("node", ssh_config=Path("/c"), host_key_policy="accept-new")
    proxy = parse(f"{TEXT}proxyjump {jump}\n", target).proxy
    assert proxy is not None
    assert list(proxy[-len(words) :]) == words
    assert list(proxy[:5]) == ["ssh", "-F", "/c", "-o", "BatchMode=yes"]
    assert "StrictHostKeyChecking=accept-new" in proxy


def test_none_is_not_a_host() -> None:
    """``none`` switches a jump or a proxy off."""
    found = parse(f"{TEXT}proxyjump none\nproxycommand none\n", Target("node"))
    assert (found.proxy, found.proxy_shell) == (None, None)


def test_a_users_own_accept_new_counts() -> None:
    """Whoever lets unknown hosts into ssh lets them in here, too; a changed key is another matter."""
    text = TEXT.replace("stricthostkeychecking ask", "stricthostkeychecking accept-new")
    assert parse(text, Target("node")).accept_new


def test_the_agent_of_the_configuration_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, a path, a variable, or the usual one."""
    monkeypatch.setenv("SSH_AUTH_SOCK", "/usual")
    monkeypatch.setenv("OTHER", "/other")
    said = {"": "/usual", "identityagent none\n": None, "identityagent ~/a\n": str(Path.home() / "a")}
    said |= {"identityagent $OTHER\n": "/other", "identityagent SSH_AUTH_SOCK\n": "/usual"}
    for extra, expected in said.items():
        assert parse(TEXT + extra, Target("node")).identity_agent == expected
    monkeypatch.delenv("SSH_AUTH_SOCK")
    assert parse(TEXT, Target("node")).identity_agent is None


def test_tokens_are_replaced_and_a_doubled_sign_is_one() -> None:
    """Known tokens are replaced, others stay."""
    tokens = {"h": "host", "p": "22"}
    assert expand("%h:%p 100%% %% %x %%h", tokens) == "host:22 100% % %x %h"


def test_ssh_itself_is_asked(tmp_path: Path) -> None:
    """The real ssh resolves patterns and its own defaults."""
    path = tmp_path / "config"
    path.write_text("Host gpu-*\n  HostName %h.example.org\n  Port 2200\nHost *\n  User ann\n", "utf-8")
    found = resolve(Target("gpu-7", ssh_config=path))
    assert (found.hostname, found.port, found.user) == ("gpu-7.example.org", 2200, "ann")
