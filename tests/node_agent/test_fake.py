"""The stand-in server behaves like the real one where other tests lean on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from surgeon.bench.smoke import CODE, Load, read_run
from surgeon.environment.probe import CODE as PROBE
from surgeon.environment.probe import read_probe
from tests.support.packages import install_companions

if TYPE_CHECKING:
    from surgeon.node.client import Node
    from tests.support.servers import FakeServer


def test_the_smoke_benchmark_runs_against_it(fake: FakeServer, node: Node) -> None:
    """Every request whole, tokens by the server's count."""
    fake.start()
    load = Load(prompts=6, input_len=4, output_len=5, concurrency=3)
    argv = load.argv(port=fake.port, model=str(fake.model))
    ran = node.call("run", {"pid": fake.pid, "code": CODE, "argv": argv})
    result = read_run(ran["stdout"], ran["stderr"], ran["returncode"], load, when=0.0, patched="", version="0.5.9")
    assert result.problems == ()
    assert (result.completed, result.tokens) == (6, 30)


def test_its_interpreter_builds_the_models_config_until_transformers_is_replaced(fake: FakeServer, node: Node) -> None:
    """A later install brings a transformers that does not know the model."""
    fake.start()

    def probe() -> dict[str, object]:
        ran = node.call("run", {"pid": fake.pid, "code": PROBE, "argv": [str(fake.model), "0"]})
        return dict(read_probe(ran["stdout"], ran["stderr"], ran["returncode"]))

    assert probe()["ok"] is True
    install_companions(fake.site, transformers="4.40.0", knows=())
    assert "glm4_moe" in json.dumps(probe())
    assert probe()["ok"] is False
