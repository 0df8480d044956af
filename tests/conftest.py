"""For every test: programs that tests start cache their bytecode, and two workers share the tests without meeting."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

# Some machines export it; each of the hundreds of commands that tests run would then compile surgeon anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell that runs the tests in the background has its children ignore Ctrl-C, which commands under test must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of these folders start no server, so any worker may take any of them.
_FREE = {"bench", "environment", "ledger", "patches", "surgery"}


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Give the lab's tests to one worker and those with servers of their own to another; these long groups come first.

    There is one lab, and a test that looks for servers on this machine must not find another test's.
    """
    here = Path(__file__).parent
    groups = {}
    for item in items:
        if item.get_closest_marker("lab"):
            groups[item] = "lab"
        elif item.path.relative_to(here).parts[0] not in _FREE:
            groups[item] = "servers"
        if item in groups:
            item.add_marker(pytest.mark.xdist_group(groups[item]))
    yield
    order = ("lab", "servers", None)
    items.sort(key=lambda item: order.index(groups.get(item)))
