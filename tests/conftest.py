"""For every test: programs that tests start cache their bytecode, and two workers share the tests without meeting."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

# Some machines export it; each of the hundreds of commands that tests run would then compile surgeon anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell that runs the tests in the background has its children ignore Ctrl-C, which commands under test must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of these folders start no sglang server, so any worker may take any of them.
_FREE = {"bench", "benchmarks", "environment", "gpu", "ledger", "patches", "registry", "surgery"}
_ROOT = Path(__file__).parent.parent


@functools.cache
def _scope(file: str) -> str:
    """What one worker must run alone: there is one lab, and a test that looks for servers must not find another's.

    Args:
        file: a test file, relative to the repository.

    Returns:
        The name of the scope; empty if any worker may run any of the file's tests.
    """
    if "mark.lab" in (_ROOT / file).read_text(encoding="utf-8"):
        return "lab"
    return "" if Path(file).parts[1] in _FREE else "servers"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the two long scopes first, so that both workers have one from the start."""
    order = {"lab": 0, "servers": 1}
    items.sort(key=lambda item: order.get(_scope(item.nodeid.partition("::")[0]), 2))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand scopes to workers, in that order."""
    from xdist.scheduler import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0]) or nodeid

    config.option.loadscopereorder = False
    return Scopes(config, log)
