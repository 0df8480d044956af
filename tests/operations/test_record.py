"""Recording what a server routes: its recorder is used only where that is safe, and is never left on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.errors import DoesNotFitError, SurgeonError, UsageError
from surgeon.operations import record, survey
from surgeon.operations.observer import Silent
from tests.support import recordings
from tests.support.bed import make_bed
from tests.support.local_node import local_node
from tests.support.packages import TOPK
from tests.support.servers import CONFIG, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from surgeon.node.target import Target

FLAG = ("--expert-distribution-recorder-mode", "per_pass")


def counts(rows: int, shift: int) -> list[list[int]]:
    """Two routed layers of 64 experts behind a dense one: each row takes the next eight experts, layer by layer."""
    layers = [[0] * 64 for _ in range(3)]
    for row in range(rows):
        for layer in (1, 2):
            for step in range(8):
                layers[layer][(row * 8 * layer + shift + step) % 64] += 1
    return layers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings that the fake server's recorder writes: passes of 100, 4 and 4 rows."""
    folder = tmp_path_factory.mktemp("recordings")
    passes = [counts(100, 0), counts(4, 0), counts(4, 8)]
    recordings.write(folder, passes, rows=(100, 4, 4), modes=(1, 2, 2))
    return folder


class Place:
    """A fake sglang on this machine, as a node."""

    def __init__(self, root: Path, files: Path, *options: str) -> None:
        self.folder = root / "recorded"
        self.folder.mkdir(parents=True)
        environ = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(self.folder)}
        self.server = FakeServer.install(root / "fake", version="0.5.23", options=options, environ=environ)
        self.server.behave(recordings=(str(files / "per_pass.pt"),))
        self.node = local_node(root / "state", port=self.server.port, python=str(self.server.python))
        self.target: Target = self.node.target

    def record(self, **given: Any) -> record.Outcome:
        """Record for a moment."""
        return record.run(self.node, self.target, Silent(), **{"seconds": 0.2, **given})

    @property
    def told(self) -> list[str]:
        """What the recorder was told to do, in order."""
        lines = self.server.said().splitlines()
        return [line.removeprefix("recorder: ") for line in lines if line.startswith("recorder: ")]


@pytest.fixture
def place(tmp_path: Path, files: Path) -> Iterator[Place]:
    """A server whose recorder was switched on."""
    there = Place(tmp_path, files, *FLAG)
    with there.server, there.node:
        there.server.start()
        yield there


def test_a_recording_is_made_fetched_and_cleared_away(place: Place, files: Path) -> None:
    """Started, stopped after a while, written, read byte for byte, and taken from the node's folder again."""
    began = time.monotonic()
    outcome = place.record(seconds=1.0)
    assert time.monotonic() - began >= 1.0
    assert place.told == ["start", "stop", "dump"]
    assert outcome.data == (files / "per_pass.pt").read_bytes()
    assert list(place.folder.iterdir()) == []
    assert (outcome.mode, outcome.ranks, outcome.passes) == ("per_pass", 1, 3)
    (size,) = outcome.summary.sizes
    assert (size.rows, size.passes, size.active) == (4, 2, 32.0)


def test_other_peoples_recordings_are_left_where_they_are(place: Place, files: Path) -> None:
    """Only files that were written since are taken."""
    old = place.folder / f"expert_distribution_recorder_{time.time() - 60}_0.pt"
    old.write_bytes((files / "per_token.pt").read_bytes())
    assert place.record().data == (files / "per_pass.pt").read_bytes()
    assert list(place.folder.iterdir()) == [old]


def test_a_load_is_sent_while_the_recorder_runs(place: Place) -> None:
    """One request per round, all in one go with start and stop."""
    outcome = place.record(load=record.Load(in_flight=4, tokens=3, rounds=2))
    assert place.told == ["start", "stop", "dump"]
    assert any("random tokens" in note for note in outcome.notes)


def test_prompts_are_random_and_of_the_models_vocabulary() -> None:
    """As many as are wanted, other ones in each round."""
    first, second = record.Load(in_flight=3, tokens=5, prompt=20).bodies(512)
    assert [len(prompt) for prompt in first["input_ids"]] == [20, 20, 20]
    assert max(token for prompt in first["input_ids"] for token in prompt) < 512
    assert first["input_ids"] != second["input_ids"]
    assert first["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 5, "ignore_eos": True}


def test_a_server_whose_recorder_is_off_is_left_alone(tmp_path: Path, files: Path) -> None:
    """Its endpoints would end it, so they are not called; the flag and the restart are named."""
    there = Place(tmp_path, files)
    with there.server, there.node:
        there.server.start()
        with pytest.raises(DoesNotFitError, match="found: it is off") as refused:
            there.record()
        assert refused.value.code == "recorder-off"
        assert "--expert-distribution-recorder-mode per_pass" in refused.value.advice
        assert there.told == []
        os.kill(there.server.pid, 0)


def test_no_server_is_said(tmp_path: Path, files: Path) -> None:
    """Nothing to record."""
    there = Place(tmp_path, files, *FLAG)
    with there.node, pytest.raises(DoesNotFitError, match="no sglang server"):
        there.record()


def seen(version: str, *words: str, shared: int = 0) -> survey.Survey:
    """What a survey of a node tells whose server was started with these words, and does not answer."""
    server = {
        "pid": 7,
        "start_ticks": 1,
        "started": 1.0,
        "uid": 0,
        "user": "root",
        "cwd": "/",
        "interpreter": "/python",
        "port": 30000,
        "host": "127.0.0.1",
        "listening": True,
        "model_path": "/model",
        "log": None,
        "env": {},
        "argv": ["python", "-m", "sglang.launch_server", *words],
        "workers": [],
        "tree": [7],
    }
    package = {"dir": "/site/sglang", "version": version, "site_packages": "/site", "site_id": "s", "requires": []}
    interpreter = {"path": "/python", "source": "server", "version": "3.11"}
    model = {"path": "/model", "config": {**CONFIG, "n_shared_experts": shared}}
    raw = {"servers": [server], "chosen": 7, "package": package, "interpreter": interpreter, "model": model}
    return survey.parse(raw)


def test_a_server_that_moves_experts_by_its_recorder_is_left_alone() -> None:
    """EPLB counts with the same recorder."""
    with pytest.raises(DoesNotFitError, match="EPLB") as refused:
        record.ready(seen("0.5.23", *FLAG, "--enable-eplb"))
    assert refused.value.code == "recorder-in-use"


def test_a_server_that_says_nothing_is_judged_by_its_command_line() -> None:
    """Without the flag there it is left alone."""
    assert record.ready(seen("0.5.23", "--expert-distribution-recorder-mode=stat")) == "stat"
    with pytest.raises(DoesNotFitError, match="the server does not say, nor does its command line"):
        record.ready(seen("0.5.23"))


@pytest.mark.parametrize(
    ("version", "words", "refused"),
    [
        ("0.5.20", (), True),
        ("0.5.20", ("--disable-shared-experts-fusion",), False),
        ("0.5.21", (), False),
        ("0.0.0.dev1+g1234", (), True),
        ("unknown", (), True),
    ],
)
def test_fused_shared_experts_before_0_5_21_are_refused(version: str, words: tuple[str, ...], *, refused: bool) -> None:
    """Their column lies outside of what the recorder counts in."""
    found = seen(version, *FLAG, *words, shared=1)
    with pytest.raises(DoesNotFitError, match="fused shared experts") if refused else contextlib.nullcontext():
        assert record.ready(found) == "per_pass"


def test_a_recorder_that_was_on_is_on_again(tmp_path: Path, files: Path) -> None:
    """The server's own metrics count with it from the start."""
    there = Place(tmp_path, files, *FLAG, "--enable-expert-distribution-metrics")
    with there.server, there.node:
        there.server.start()
        there.record()
        assert there.told == ["start", "stop", "dump", "start"]


def test_a_server_that_ends_under_the_load_is_told_of(place: Place, files: Path) -> None:
    """The recording is lost, and what to do is said."""
    place.server.end()
    place.server.behave(die_on_generate=True, recordings=(str(files / "per_pass.pt"),))
    place.server.start()
    with pytest.raises(SurgeonError, match="stopped answering while it was recorded") as failed:
        place.record(load=record.Load(in_flight=2))
    assert failed.value.code == "server-gone"
    assert "surgeon logs" in failed.value.advice
    assert list(place.folder.iterdir()) == []


def test_a_server_that_is_killed_while_it_is_listened_to_is_told_of(place: Place) -> None:
    """The wait is not in vain for long, and the message is the same."""

    def kill() -> None:
        until = time.monotonic() + 30
        while "start" not in place.told and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(place.server.pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(SurgeonError, match="stopped answering") as failed:
        place.record(seconds=2.0)
    assert failed.value.code == "server-gone"


def test_the_recorder_is_stopped_although_the_person_gave_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the wait: the recorder is stopped at once, and once more by the node itself."""
    original = place.node.call

    def interrupted(verb: str, args: Any = None, *, deadline_s: float = 30.0) -> dict[str, Any]:
        if verb == "http" and len(args["requests"]) > 1:
            first = {**args, "requests": args["requests"][:1]}
            original(verb, first, deadline_s=deadline_s)
            raise KeyboardInterrupt
        return original(verb, args, deadline_s=deadline_s)

    monkeypatch.setattr(place.node, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place.record(seconds=30.0)
    assert place.told == ["start", "stop"]


@pytest.mark.parametrize(("sign", "seconds"), [(signal.SIGKILL, 4), (signal.SIGINT, 30)])
def test_the_recorder_is_stopped_although_the_client_is_gone(
    tmp_path: Path, files: Path, sign: signal.Signals, seconds: int
) -> None:
    """Over SSH, in the middle of the wait: killed, the node stops it when the time is over; on Ctrl-C, at once."""
    with make_bed(tmp_path / "bed", source=TOPK, options=FLAG) as bed:
        bed.fake.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"] = str(tmp_path)
        bed.fake.behave(recordings=(str(files / "per_pass.pt"),))
        bed.fake.start()
        client = subprocess.Popen(
            [sys.executable, "-m", "surgeon", "record", "routing", "--seconds", str(seconds)],
            env={**os.environ, "SURGEON_CONFIG": str(bed.root / "surgeon.toml")},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        await_word(bed.fake, "recorder: start")
        client.send_signal(sign)
        _, said = client.communicate(timeout=25)
        await_word(bed.fake, "recorder: stop")
        if sign == signal.SIGINT:
            assert client.returncode == 130
            assert "the recorder was stopped" in said
            assert "interrupted" in said


def await_word(server: FakeServer, word: str) -> None:
    """Wait until the server has logged a line."""
    until = time.monotonic() + 30
    while word not in server.said().splitlines():
        assert time.monotonic() < until, server.said()
        time.sleep(0.05)


def test_a_recorder_that_writes_nothing_is_told_of(place: Place, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that was looked in is named."""
    monkeypatch.setattr(record, "_WRITE_S", 0.5)
    place.server.end()
    place.server.behave(recordings=())
    place.server.start()
    with pytest.raises(SurgeonError, match="wrote no file") as failed:
        place.record()
    assert (failed.value.code, failed.value.where) == ("no-recording", str(place.folder))
    assert files.is_dir()


def test_a_file_that_is_no_recording_is_told_of_and_cleared_away(place: Place, files: Path) -> None:
    """What the server wrote cannot be read; nothing is left on the node."""
    place.server.end()
    place.server.behave(recordings=(str(files / "weights.pt"),))
    place.server.start()
    with pytest.raises(UsageError, match="cannot be read as a recording"):
        place.record()
    assert list(place.folder.iterdir()) == []


def test_a_recording_that_is_too_large_is_not_fetched(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cleared away, and a shorter time is advised."""
    monkeypatch.setattr(record, "FILE_LIMIT", 100)
    with pytest.raises(UsageError, match="MB; expected at most") as refused:
        place.record()
    assert "--seconds" in refused.value.advice
    assert list(place.folder.iterdir()) == []


def test_ranks_that_wrote_nothing_are_told_of(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one file."""
    monkeypatch.setattr(record, "_WRITE_S", 0.5)
    there = Place(tmp_path, files, *FLAG, "--tp", "2")
    with there.server, there.node:
        there.server.start()
        outcome = there.record()
    assert outcome.notes[0].startswith("1 of 2 ranks wrote a file")
