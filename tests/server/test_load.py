"""How many requests run, as servers of three generations tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from surgeon.server import load
from tests.support.wheels import member


def answer(said: Any, status: int = 200) -> dict[str, Any]:
    """An answer of the agent's ``http`` verb."""
    return {"status": status, "body": said if isinstance(said, str) else json.dumps(said)}


@pytest.mark.parametrize(
    ("path", "said", "requests"),
    [
        ("/v1/loads", {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}]}, 0),
        ("/v1/loads", {"loads": [{"num_running_reqs": n, "num_waiting_reqs": 1} for n in (3, 1)]}, 6),
        ("/get_load", [{"dp_rank": 0, "num_reqs": 4, "num_waiting_reqs": 1, "num_tokens": 99}], 4),
        ("/get_load", {"load": 0}, 0),
        ("/get_load", {"load": 512}, 1),
    ],
)
def test_every_generation_of_the_answer_is_read(path: str, said: Any, requests: int) -> None:
    """Requests of all ranks, waiting ones too; where only tokens are told, some or none."""
    assert load.read(path, answer(said)) == load.Load(requests, path)


@pytest.mark.parametrize(
    "reply",
    [
        answer({"detail": "Not Found"}, 404),
        answer("<html>"),
        answer({"loads": [{"other": 1}]}),
        answer({"load": "much"}),
        answer([]) | {"status": None, "body": None},
    ],
)
def test_what_tells_nothing_is_no_load(reply: dict[str, Any]) -> None:
    """A missing endpoint, another server's page, or fields of a later release must not read as idle."""
    assert load.read("/v1/loads", reply) is None


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "path", "module", "words"),
    [
        ("0.5.23", "/v1/loads", "sglang/srt/managers/load_snapshot.py", ("num_running_reqs", "num_waiting_reqs")),
        ("0.5.8", "/v1/loads", "sglang/srt/managers/io_struct.py", ("num_running_reqs", "num_waiting_reqs")),
        ("0.5.5", "/get_load", "sglang/srt/managers/io_struct.py", ("num_reqs",)),
        ("0.4.10", "/get_load", "sglang/srt/managers/tokenizer_manager.py", ('{"load": self.current_load}',)),
    ],
)
def test_the_names_are_those_of_the_wheels(version: str, path: str, module: str, words: tuple[str, ...]) -> None:
    """Each generation's endpoint and fields, in the release that is the witness for it."""
    routes = "sglang/srt/entrypoints/" + ("v1_loads.py" if path == "/v1/loads" else "http_server.py")
    assert f'"{path}"'.encode() in member(version, routes)
    for word in words:
        assert word.encode() in member(version, module)
