"""The node cannot be reached, or lets nobody in, or has no Python: exit code 3, what to do, and nothing touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.ssh import free_port, make_key, silent_port

if TYPE_CHECKING:
    from tests.support.bed import Bed


def test_an_unreachable_host_is_named_with_its_address(bed: Bed) -> None:
    """Nothing listens there: the message says which name became which address and port."""
    port = free_port()
    bed.ssh.configure(Port=str(port))
    before = bed.facts()
    answer = bed.apply()
    assert answer.code == 3
    assert f"node (127.0.0.1 port {port}) cannot be reached: Connection refused" in answer.stderr
    assert "Check that the node is up" in answer.stderr
    assert bed.facts() == before


def test_a_name_that_resolves_to_nothing_is_told_from_a_node_that_is_down(bed: Bed) -> None:
    """A typing error in a name is mended elsewhere than a node that is off."""
    bed.ssh.configure(HostName="no-such-node.invalid")
    answer = bed.apply()
    assert answer.code == 3
    assert "The name no-such-node.invalid of node cannot be resolved" in answer.stderr


def test_a_host_that_never_answers_is_given_up_after_the_connection_timeout(bed: Bed) -> None:
    """A firewall that drops packets must not hang a terminal for minutes."""
    bed.configure(connect_timeout_s=1)
    with silent_port() as port:
        bed.ssh.configure(Port=str(port))
        bed.ssh.know(f"[127.0.0.1]:{port}")
        answer = bed.apply(timeout_s=30)
    assert answer.code == 3
    assert "does not speak SSH with us" in answer.stderr
    assert "ssh -v node true" in answer.stderr


def test_a_refused_key_says_who_was_refused_and_what_was_tried(bed: Bed) -> None:
    """The user, the keys that were offered, and the one command that must work first."""
    stranger = make_key(bed.root / "stranger")
    bed.ssh.configure(IdentityFile=str(stranger))
    before = bed.facts()
    answer = bed.apply()
    assert answer.code == 3
    assert "node does not let " in answer.stderr
    assert str(stranger) in answer.stderr
    assert "Make `ssh node true` work without a prompt" in answer.stderr
    assert bed.facts() == before


@pytest.mark.parametrize("words", [(), ("--accept-new",)])
def test_a_changed_host_key_is_refused_with_the_line_that_is_in_the_way(bed: Bed, words: tuple[str, ...]) -> None:
    """Neither strictness nor --accept-new lets another machine take a known one's place."""
    impostor = make_key(bed.root / "other_host_key").with_suffix(".pub").read_text("utf-8")
    bed.ssh.know(key=" ".join(impostor.split()[:2]))
    before = bed.facts()
    answer = bed.apply(*words)
    assert answer.code == 3
    assert "changed" in answer.stderr
    assert str(bed.ssh.known_hosts) in answer.stderr
    assert f'ssh-keygen -R "[127.0.0.1]:{bed.ssh.port}"' in answer.stderr.replace("'", '"')
    assert bed.facts() == before


def test_an_unknown_host_key_is_refused_and_can_be_accepted_once(bed: Bed) -> None:
    """Strict by default; --accept-new writes it down, and from then on it must stay the same."""
    bed.ssh.known_hosts.write_text("", "utf-8")
    answer = bed.surgeon("history")
    assert answer.code == 3
    assert "--accept-new" in answer.stderr
    assert bed.surgeon("history", "--accept-new").code == 0
    assert bed.ssh.public_host_key in bed.ssh.known_hosts.read_text("utf-8")


def test_a_node_without_python_says_what_was_tried(bed: Bed) -> None:
    """The agent needs a python3 of any kind; the message says how to name one."""
    bed.configure(node_python="/nowhere/bin/python3")
    before = bed.facts()
    answer = bed.apply()
    assert answer.code == 3
    assert "There is no Python 3.8 or later on node; tried /nowhere/bin/python3" in answer.stderr
    assert "node_python" in answer.stderr
    assert bed.facts() == before


def test_json_carries_the_same_refusal_for_programs(bed: Bed) -> None:
    """One object on standard output: ok is false, and the problem has its code, its advice and its place."""
    bed.ssh.configure(Port=str(free_port()))
    answer = bed.surgeon("status", "--json")
    assert answer.code == 3
    assert answer.body["ok"] is False
    assert (answer.problem["code"], answer.problem["where"]) == ("unreachable", "node")
