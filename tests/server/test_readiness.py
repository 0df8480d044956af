"""The ladder from a living process to a checked answer, climbed by real processes that fail on each rung."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.node.agent import procfs
from surgeon.server.beacons import judge
from surgeon.server.model import parse_launch, parse_server, parse_started
from surgeon.server.readiness import NotReady, Ready, check_answer, wait_ready
from tests.support.local_node import server_at

if TYPE_CHECKING:
    from surgeon.node.client import Node
    from tests.support.servers import FakeServer

RUNGS = ["process", "port", "health", "workers", "generation"]


def climb(node: Node, fake: FakeServer, **limits: Any) -> Ready | NotReady:
    """Wait for a server that was just started."""
    process = procfs.process(fake.pid)
    assert process is not None
    started = {
        "pid": fake.pid,
        "start_ticks": process.start_ticks,
        "port": fake.port,
        "log": str(fake.log),
        "log_offset": 0,
    }
    return wait_ready(node, started, **{"deadline_s": 20.0, "poll_s": 0.1, **limits})


def failed(outcome: Ready | NotReady, rung: str) -> NotReady:
    """The outcome, which must have failed on a rung after passing all before it."""
    assert isinstance(outcome, NotReady), outcome
    assert [one.name for one in outcome.rungs] == RUNGS[: RUNGS.index(rung) + 1]
    assert [one.passed for one in outcome.rungs] == [True] * RUNGS.index(rung) + [False]
    assert outcome.why.startswith(rung + ": ")
    return outcome


class Told:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def progress(self, text: str) -> None:
        """Remember it."""
        self.said.append(text)


def test_a_server_that_starts_slowly_but_surely_is_ready(fake: FakeServer, node: Node) -> None:
    """Its log grows, so a short patience is enough; the observer is told what is waited for."""
    fake.behave(start_s=1.5, warm_up_s=0.5)
    fake.options = ("--tp", "2")
    fake.start(wait=False)
    told = Told()
    outcome = climb(node, fake, workers=2, quiet_s=1.4, observer=told)
    assert isinstance(outcome, Ready), outcome
    assert [one.name for one in outcome.rungs] == RUNGS
    assert outcome.seconds >= 1.5
    assert any(one.startswith("waiting for port: Loading weights") for one in told.said)
    assert any(one.startswith("waiting for health") for one in told.said)


def test_a_server_that_says_nothing_more_is_given_up_before_the_deadline(fake: FakeServer, node: Node) -> None:
    """A hang at start would otherwise cost the whole deadline."""
    fake.behave(never_listens=True, log_while_starting=False)
    fake.start(wait=False)
    outcome = failed(climb(node, fake, deadline_s=60, quiet_s=0.8), "port")
    assert "log has not grown" in outcome.why
    assert outcome.seconds < 20


def test_a_server_that_talks_for_ever_is_given_up_at_the_deadline(fake: FakeServer, node: Node) -> None:
    """Progress in the log is no readiness."""
    fake.behave(never_listens=True)
    fake.start(wait=False)
    outcome = failed(climb(node, fake, deadline_s=1.5, quiet_s=60), "port")
    assert "not reached within 2 s" in outcome.why


def test_a_death_is_noticed_at_once_with_the_cause_from_its_log(fake: FakeServer, node: Node) -> None:
    """Long before the deadline, and with advice."""
    fake.behave(start_s=0.6, dies=True, die_log="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    fake.start(wait=False)
    outcome = failed(climb(node, fake, deadline_s=60), "port")
    assert "process has ended" in outcome.why
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.cause.name == "out-of-memory"
    assert "CUDA out of memory" in outcome.why
    assert outcome.advice == outcome.diagnosis.cause.advice
    assert "CUDA out of memory" in outcome.log_tail
    assert outcome.seconds < 20


def test_a_cause_in_the_log_of_an_earlier_start_is_not_blamed(fake: FakeServer, node: Node) -> None:
    """Only what this start wrote counts."""
    fake.log.write_text("torch.OutOfMemoryError: CUDA out of memory.\n", encoding="utf-8")
    offset = fake.log.stat().st_size
    fake.behave(dies=True, start_s=0.5, die_log="OSError: [Errno 98] Address already in use")
    fake.start(wait=False)
    started = {"pid": fake.pid, "port": fake.port, "log": str(fake.log), "log_offset": offset}
    outcome = failed(wait_ready(node, started, deadline_s=20, poll_s=0.1), "port")
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.cause.name == "port-in-use"


def test_another_process_on_the_port_is_not_readiness(fake: FakeServer, node: Node) -> None:
    """It is named, and nothing is waited for."""
    fake.behave(never_listens=True)
    fake.start(wait=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fake.port))
        taken.listen()
        outcome = failed(climb(node, fake), "port")
    assert f"pid {os.getpid()} " in outcome.why


def test_health_that_never_comes_is_not_readiness(fake: FakeServer, node: Node) -> None:
    """503 is what a server says while it starts."""
    fake.behave(health=503)
    fake.start()
    failed(climb(node, fake, deadline_s=1.0), "health")


def test_a_rank_that_is_missing_is_not_readiness(fake: FakeServer, node: Node) -> None:
    """As many schedulers as before must run."""
    fake.options = ("--tp", "2")
    fake.behave(missing_workers=1)
    fake.start()
    outcome = failed(climb(node, fake, workers=2, deadline_s=4.0), "workers")
    assert "1 of 2 schedulers" in outcome.why


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"hang_after": 0}, "no answer within 1.0 s"),
        ({"extra_tokens": -7}, "expected 8 tokens, the server counted 1"),
        ({"nan": True}, "not finite: e2e_latency"),
        ({"die_on_generate": True, "die_log": "RuntimeError: x"}, "process has ended"),
    ],
)
def test_a_healthy_server_that_does_not_generate_is_not_ready(
    switches: dict[str, Any], words: str, fake: FakeServer, node: Node
) -> None:
    """200 of /health with a generation that hangs, is short, is garbage, or kills the server."""
    fake.behave(health=200, **switches)
    fake.start()
    outcome = failed(climb(node, fake, generate_timeout_s=1.0), "generation")
    assert words in outcome.why


def test_a_server_without_a_tokenizer_is_asked_with_ids(fake: FakeServer, node: Node) -> None:
    """--skip-tokenizer-init refuses text."""
    fake.behave(needs_ids=True)
    fake.start()
    assert isinstance(climb(node, fake), Ready)


def test_a_death_between_two_looks_is_not_mistaken_for_another_servers_life(fake: FakeServer, node: Node) -> None:
    """Killed while its port is waited for."""
    fake.behave(never_listens=True)
    fake.start(wait=False)

    class Killer(Told):
        def progress(self, text: str) -> None:
            super().progress(text)
            if len(self.said) == 1:
                os.kill(fake.pid, signal.SIGKILL)

    outcome = failed(climb(node, fake, deadline_s=60, observer=Killer()), "port")
    assert "process has ended" in outcome.why


def test_a_restart_with_a_patch_is_proved_by_the_beacons_of_both_ranks(fake: FakeServer, node: Node) -> None:
    """From `restart` through the ladder to the judgement, with the client's own types."""
    fake.options = ("--tp", "2")
    fake.start()
    runtime, settings = (fake.topk.with_name("_surgeon_oea" + ending) for ending in (".py", ".json"))
    beacons = fake.root / "beacons"
    fake.topk.write_bytes(b"from sglang.srt.layers.moe import _surgeon_oea\n")
    runtime.write_text('PATCH_HASH = "abc"\n', encoding="utf-8")
    settings.write_text(json.dumps({"generation": 1, "k0": 4, "beacon_dir": str(beacons)}), encoding="utf-8")
    started = parse_started(node.call("restart", {"pid": fake.pid, "timeout_s": 10}))
    assert isinstance(wait_ready(node, started, workers=2, deadline_s=20, poll_s=0.1), Ready)
    server = parse_server(server_at(node, fake.port))
    assert server.pid == started.pid
    assert server.listening
    wanted = {"patch_hash": "abc", "generation": 1, "settings": {"k0": 4}, "need_applied": True}
    until = time.monotonic() + 10
    problems = ["not looked at"]
    while problems and time.monotonic() < until:
        asked = {"pid": server.pid, "port": server.port, "beacon_dirs": [str(beacons)]}
        problems = judge(node.call("watch", asked)["beacons"], server.workers, **wanted)  # type: ignore[arg-type]
    assert problems == []
    launch = parse_launch(node.call("survey", {"port": fake.port})["launch"])
    assert launch is not None
    assert (launch.phase, launch.pid, launch.alive) == ("started", started.pid, True)


GOOD = {"text": "x", "output_ids": [1, 2], "meta_info": {"completion_tokens": 2, "e2e_latency": 0.1}}


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"text": "x"},
        {**GOOD, "output_ids": [1]},
        {**GOOD, "text": None, "output_ids": None},
        {**GOOD, "meta_info": {"completion_tokens": 3}},
        {**GOOD, "meta_info": {"completion_tokens": 2, "cached": float("inf")}},
    ],
)
def test_an_answer_that_is_not_what_a_healthy_server_says_is_refused(answer: Any) -> None:
    """No object, no count, another count, nothing generated, or values that are not finite."""
    with pytest.raises(ValueError, match=r"expected|not finite|neither"):
        check_answer(json.dumps(answer), tokens=2)


def test_answers_of_old_and_new_releases_are_accepted() -> None:
    """Old ones return no ids; a batch of one comes as a list."""
    assert check_answer(json.dumps(GOOD), tokens=2) == "2 tokens"
    assert check_answer(json.dumps([GOOD]), tokens=2) == "2 tokens"
    assert check_answer(json.dumps({k: v for k, v in GOOD.items() if k != "output_ids"}), tokens=2) == "2 tokens"
