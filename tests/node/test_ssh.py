"""Whether surgeon gets to a node wherever the user's ``ssh`` does, and says what is wrong where it does not."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from surgeon.errors import UnreachableError, UsageError
from surgeon.node.client import Node, connect
from surgeon.node.target import Target
from tests.support.ssh import free_port, make_key, openssh_node, silent_port, tool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ssh import SshNode

SITE = {"site_id": "0" * 12}


def speaks(node: Node) -> bool:
    """Have the agent answer something simple."""
    with node:
        return node.call("ledger", SITE) == {"records": [], "lease": None, "torn": []}


def user_ssh(node: SshNode) -> subprocess.CompletedProcess[bytes]:
    """Run the user's own ssh against a node: what surgeon is to be compared with."""
    return tool("ssh", "-F", str(node.config), "-o", "BatchMode=yes", "node", "true")


def fingerprint(public_key: Path) -> str:
    """Let ssh-keygen say a key's fingerprint."""
    return tool("ssh-keygen", "-lf", str(public_key)).stdout.decode().split()[1]


def test_a_verb_goes_to_the_node_and_its_answer_comes_back(ssh_node: SshNode) -> None:
    """Both servers carry a request and its answer."""
    assert speaks(connect(ssh_node.target))


def test_a_host_of_an_included_file_is_found(openssh: SshNode) -> None:
    """Include is followed, as ssh does and Fabric alone does not."""
    included = openssh.config.with_name("included")
    included.write_bytes(openssh.config.read_bytes())
    openssh.config.write_text(f"Include {included}\n", "utf-8")
    assert speaks(connect(openssh.target))


def test_crlf_in_the_configuration_does_no_harm(openssh: SshNode) -> None:
    """A configuration that was written on Windows works."""
    openssh.config.write_bytes(openssh.config.read_bytes().replace(b"\n", b"\r\n"))
    assert speaks(connect(openssh.target))


def test_a_match_block_decides_the_port(openssh: SshNode) -> None:
    """Match exec is honoured, since ssh itself reads the configuration."""
    text = openssh.config.read_text("utf-8").replace(f"Port {openssh.port}", "")
    match = f'Match originalhost node exec "true"\n    Port {openssh.port}\n'
    openssh.config.write_text(match + text, "utf-8")
    assert speaks(connect(openssh.target))


def test_user_and_port_in_the_name_are_understood(openssh: SshNode) -> None:
    """ssh://user@host:port is a name that ssh takes, so surgeon does too."""
    openssh.configure(host="127.0.0.1", Port="1", User="nobody")
    uri = f"ssh://{getpass.getuser()}@127.0.0.1:{openssh.port}"
    assert speaks(connect(replace(openssh.target, host=uri)))


def test_a_jump_host_is_gone_through(openssh: SshNode, tmp_path: Path) -> None:
    """ProxyJump reaches a node through a second server, with keys checked at each hop."""
    with openssh_node(tmp_path / "hop") as hop:
        hop.configure(host="hop")
        openssh.configure(ProxyJump="hop")
        openssh.config.write_text(openssh.config.read_text("utf-8") + hop.config.read_text("utf-8"), "utf-8")
        assert speaks(connect(openssh.target))
        assert "Accepted publickey" in hop.log()


def test_a_jump_host_that_is_not_known_is_named_in_the_error(openssh: SshNode, tmp_path: Path) -> None:
    """The policy holds for every hop, and the message says which one failed of what."""
    with openssh_node(tmp_path / "hop") as hop:
        hop.known_hosts.write_text("", "utf-8")
        hop.configure(host="hop")
        openssh.configure(ProxyJump="hop")
        openssh.config.write_text(openssh.config.read_text("utf-8") + hop.config.read_text("utf-8"), "utf-8")
        with pytest.raises(UnreachableError, match=r"through `ssh .*hop`.*Host key verification failed"):
            connect(openssh.target)


def test_a_proxy_command_is_the_connection(openssh: SshNode) -> None:
    """ProxyCommand's streams carry the connection; its tokens are filled in."""
    reach = openssh.folder / "reach.py"
    reach.write_text(
        "import os, select, socket, sys\n"
        "sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "while True:\n"
        "    for end in select.select([sock, 0], [], [])[0]:\n"
        "        data = sock.recv(65536) if end is sock else os.read(0, 65536)\n"
        "        if not data: sys.exit()\n"
        "        os.write(1, data) if end is sock else sock.sendall(data)\n",
        "utf-8",
    )
    openssh.configure(ProxyCommand=f"python3 {reach} %h %p")
    assert speaks(connect(openssh.target))


def test_a_host_known_under_an_alias_is_let_through(openssh: SshNode) -> None:
    """HostKeyAlias is the name that counts."""
    openssh.know(name="the-node")
    openssh.configure(HostKeyAlias="the-node")
    assert speaks(connect(openssh.target))


@pytest.mark.parametrize("name", ["[127.0.0.*]:{port}", "hashed"])
def test_patterns_and_hashed_names_in_known_hosts_count(openssh: SshNode, name: str) -> None:
    """known_hosts is read as OpenSSH reads it."""
    openssh.know(name=None if name == "hashed" else name.format(port=openssh.port))
    if name == "hashed":
        tool("ssh-keygen", "-q", "-H", "-f", str(openssh.known_hosts)).check_returncode()
        assert b"127.0.0.1" not in openssh.known_hosts.read_bytes()
    assert speaks(connect(openssh.target))


def test_the_key_type_that_is_known_is_asked_for(tmp_path: Path) -> None:
    """A server with several host keys is asked for the one that known_hosts has."""
    rsa = make_key(tmp_path / "rsa", "rsa")
    with openssh_node(tmp_path / "ssh", options=(f"HostKey {rsa}",)) as node:
        node.know(key=" ".join(rsa.with_suffix(".pub").read_text("utf-8").split()[:2]))
        assert user_ssh(node).returncode == 0
        assert speaks(connect(node.target))


def test_a_changed_host_key_is_refused_with_the_line_that_mends_it(openssh: SshNode) -> None:
    """The error names file, line, both fingerprints, and the command; and that command does mend it."""
    other = make_key(openssh.folder / "other_host_key")
    openssh.know(key=" ".join(other.with_suffix(".pub").read_text("utf-8").split()[:2]))
    openssh.known_hosts.write_text("# a comment\n" + openssh.known_hosts.read_text("utf-8"), "utf-8")
    for policy in ("strict", "accept-new"):
        with pytest.raises(UnreachableError) as raised:
            connect(replace(openssh.target, host_key_policy=policy))
        error = raised.value
        assert f"{openssh.known_hosts} line 2" in error.message
        assert fingerprint(openssh.host_key.with_suffix(".pub")) in error.message
        assert fingerprint(other.with_suffix(".pub")) in error.message
        assert error.exit_code == 3
    mend = f"ssh-keygen -R '[127.0.0.1]:{openssh.port}' -f '{openssh.known_hosts}'"
    assert mend in error.advice
    tool("sh", "-c", mend).check_returncode()
    assert speaks(connect(replace(openssh.target, host_key_policy="accept-new")))


def test_an_unknown_host_is_refused_with_its_fingerprint(ssh_node: SshNode) -> None:
    """Strict is the default; the message has what is needed to check the key and to accept it."""
    ssh_node.known_hosts.write_text("", "utf-8")
    with pytest.raises(UnreachableError, match="is not known") as raised:
        connect(ssh_node.target)
    assert fingerprint(ssh_node.host_key.with_suffix(".pub")) in raised.value.message
    assert "accept-new" in raised.value.advice
    assert ssh_node.known_hosts.read_bytes() == b""


def test_accept_new_writes_the_key_down_so_that_ssh_knows_it_too(openssh: SshNode) -> None:
    """The line that is added is one that OpenSSH itself accepts, after a last line without an end."""
    openssh.known_hosts.write_text("elsewhere ssh-ed25519 AAAA", "utf-8")
    assert speaks(connect(replace(openssh.target, host_key_policy="accept-new")))
    assert user_ssh(openssh).returncode == 0
    assert speaks(connect(openssh.target))


def test_a_revoked_host_key_is_refused(openssh: SshNode) -> None:
    """A key marked as revoked never passes, not even with accept-new."""
    openssh.known_hosts.write_text(f"@revoked * {openssh.public_host_key}\n", "utf-8")
    with pytest.raises(UnreachableError, match="revoked"):
        connect(replace(openssh.target, host_key_policy="accept-new"))


def test_a_host_known_by_a_certificate_is_reached_through_the_users_ssh(openssh: SshNode, tmp_path: Path) -> None:
    """Paramiko cannot check host certificates; the user's own ssh can, and is used then."""
    authority = make_key(tmp_path / "ca")
    public = openssh.host_key.with_suffix(".pub")
    tool(
        "ssh-keygen", "-q", "-s", str(authority), "-I", "node", "-h", "-n", "certified", str(public)
    ).check_returncode()
    certificate = openssh.host_key.with_name(f"{openssh.host_key.name}-cert.pub")
    with openssh_node(
        tmp_path / "second", options=(f"HostKey {openssh.host_key}", f"HostCertificate {certificate}")
    ) as node:
        node.known_hosts.write_text(f"@cert-authority * {authority.with_suffix('.pub').read_text('utf-8')}", "utf-8")
        node.configure(HostKeyAlias="certified")
        opened = connect(node.target)
        assert type(opened.transport).__name__ == "OpenSshTransport"
        assert speaks(opened)


def test_a_refused_key_is_named(ssh_node: SshNode) -> None:
    """When no key is taken the message says who tried to log in, and with what."""
    stranger = make_key(ssh_node.folder / "stranger")
    ssh_node.configure(IdentityFile=str(stranger))
    with pytest.raises(UnreachableError, match=f"does not let {getpass.getuser()} in") as raised:
        connect(ssh_node.target)
    assert str(stranger) in raised.value.message
    assert raised.value.exit_code == 3


def test_a_locked_key_is_named_with_the_way_to_unlock_it(openssh: SshNode) -> None:
    """A key with a passphrase is not asked about; ssh-add is advised."""
    tool("ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(openssh.key)).check_returncode()
    with pytest.raises(UnreachableError, match="needs its passphrase") as raised:
        connect(openssh.target)
    assert f"ssh-add {openssh.key}" in raised.value.advice


def test_a_key_that_only_the_agent_holds_is_used(openssh: SshNode) -> None:
    """IdentityAgent is asked, and IdentityFile may be the public half alone."""
    path = openssh.folder / "agent.sock"
    agent = subprocess.Popen(
        [shutil.which("ssh-agent") or "ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL
    )
    try:
        limit = time.monotonic() + 10
        while not path.exists() and time.monotonic() < limit:
            time.sleep(0.02)
        tool("ssh-add", "-q", str(openssh.key), SSH_AUTH_SOCK=str(path)).check_returncode()
        openssh.key.unlink()
        openssh.configure(IdentityAgent=str(path), IdentityFile=str(openssh.key.with_suffix(".pub")))
        assert speaks(connect(openssh.target))
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_port_where_nothing_listens_is_unreachable() -> None:
    """A refused connection is said as such, with address and port."""
    port = free_port()
    with pytest.raises(UnreachableError, match=f"127.0.0.1 port {port}.*refused"):
        connect(Target(f"ssh://127.0.0.1:{port}"))


def test_a_host_that_says_nothing_is_given_up_in_time() -> None:
    """A listener that never answers costs the connect timeout and no more."""
    with silent_port() as port:
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="does not speak SSH"):
            connect(Target(f"ssh://127.0.0.1:{port}", connect_timeout_s=1))
        assert time.monotonic() - began < 5


def test_traffic_that_is_dropped_is_given_up_in_time() -> None:
    """A connection that is never taken up costs the connect timeout and no more."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        waiting = []
        # The kernel drops what comes once the queue of a listener that accepts nothing is full.
        for _ in range(4):
            other = socket.socket()
            other.setblocking(False)
            other.connect_ex(sock.getsockname())
            waiting.append(other)
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="did not take a connection within 1 s"):
            connect(Target(f"ssh://127.0.0.1:{sock.getsockname()[1]}", connect_timeout_s=1))
        assert time.monotonic() - began < 5
        for other in waiting:
            other.close()


@pytest.mark.parametrize("host", ["", "-oProxyCommand=touch", "two words"])
def test_a_name_that_ssh_would_take_for_an_option_is_refused(host: str) -> None:
    """Nothing that is typed as a host reaches ssh as an option."""
    with pytest.raises(UsageError, match="a name that ssh knows"):
        connect(Target(host))


def test_a_configuration_that_ssh_cannot_read_is_a_usage_error(openssh: SshNode) -> None:
    """The complaint that ssh makes is passed on."""
    openssh.config.write_text("Host node\n    Prot 22\n", "utf-8")
    with pytest.raises(UsageError, match="Bad configuration option: prot"):
        connect(openssh.target)
