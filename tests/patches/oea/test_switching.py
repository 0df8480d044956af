"""Settings of a running server: taken into force by all ranks at one pass, or refused and said so."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.passes import TARGET, Mode, batch_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from tests.patches.oea.conftest import Installed


def run(runtime: ModuleType, until: int) -> None:
    """Run decode passes until that many have begun."""
    while runtime._NOW.number < until:
        runtime.announce(TARGET, batch_of(Mode.DECODE, 8))


def wait(condition: Callable[[], object]) -> None:
    """Wait for what a thread does twenty times a second."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def k0(runtime: ModuleType) -> int:
    """The k0 of a pass of eight rows, in Python and in the tensor, which must be one."""
    at = runtime._operator.SCHEDULE + 8
    assert runtime._NOW.table[at] == int(runtime._NOW.policy[at])
    return int(runtime._NOW.table[at])


def offer(runtime: ModuleType, installed: Installed, **settings: Any) -> Any:
    """Write the file and do what the watching thread does with it; what it refused, if it did."""
    runtime._NOW.refused = None
    installed.write(**settings)
    runtime._NOW.arm(runtime._settings.read_settings(installed.settings, {}))
    return runtime._NOW.refused


def test_ranks_switch_at_the_same_pass(install: Callable[..., Installed], rank: Callable[..., ModuleType]) -> None:
    """Two ranks acknowledge the file by themselves and obey it from the pass that it names, not before."""
    installed = install(k0=2)
    both = [rank(installed), rank(installed)]
    for runtime in both:
        run(runtime, 10)
    installed.write(k0=5, generation=2, at_pass=42)
    for runtime in both:
        wait(lambda runtime=runtime: runtime._NOW.tell()["armed"])  # type: ignore[misc]
        assert runtime._NOW.tell()["armed"] == {"generation": 2, "at_pass": 42, "pass": 10}
        assert runtime._NOW.tell()["in_force"] == {"generation": 1, "from_pass": 0}
        run(runtime, 41)
        assert k0(runtime) == 2
    for runtime in both:
        run(runtime, 42)
        assert k0(runtime) == 5
        told = runtime._NOW.tell()
        assert (told["in_force"], told["armed"], told["refused"]) == ({"generation": 2, "from_pass": 42}, None, None)
        assert (told["settings"]["k0"], told["generation"]) == (5, 2)


def test_a_late_rank_refuses(install: Callable[..., Installed], rank: Callable[..., ModuleType]) -> None:
    """A rank that is past the pass keeps what it had and says why; it never switches alone."""
    installed = install(k0=2)
    early, late = rank(installed), rank(installed)
    run(early, 10)
    run(late, 42)
    installed.write(k0=5, generation=2, at_pass=42)
    wait(lambda: early._NOW.armed)
    wait(lambda: late._NOW.refused)
    assert late._NOW.refused == {"generation": 2, "why": "at_pass 42 is over: pass 42 has begun"}
    run(late, 100)
    assert k0(late) == 2


def test_the_beacon_follows(install: Callable[..., Installed], rank: Callable[..., ModuleType]) -> None:
    """The file carries the acknowledgement, then what is in force, and the pass counter once passes rest."""
    installed = install(k0=2)
    runtime = rank(installed)

    def told() -> Any:
        (path,) = installed.beacons.glob("*.json")
        return json.loads(path.read_text())

    run(runtime, 7)
    wait(lambda: list(installed.beacons.glob("*.json")) and told()["pass"] == 7)
    installed.write(k0=3, generation=2, at_pass=20)
    wait(lambda: told()["armed"])
    assert told()["armed"] == {"generation": 2, "at_pass": 20, "pass": 7}
    run(runtime, 25)
    wait(lambda: told()["pass"] == 25)
    assert told()["in_force"] == {"generation": 2, "from_pass": 20}
    installed.settings.write_text("{")
    wait(lambda: told()["refused"])
    assert "_surgeon_oea.json" in told()["refused"]["why"]
    assert told()["in_force"] == {"generation": 2, "from_pass": 20}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"k0": 99, "generation": 2, "at_pass": 50}, "k0: expected an integer in 0..64, found 99"),
        ({"k0_schedule": [[5, 4, 3]], "generation": 2, "at_pass": 50}, "k0_schedule: expected a list"),
        ({"k0_schedule": [[1, 4, 3], [4, 8, 2]], "generation": 2, "at_pass": 50}, "without overlap"),
        ({"p": 0, "generation": 2, "at_pass": 50}, "p: expected a number in 0.001..1.0, found 0"),
        ({"p": float("nan"), "generation": 2, "at_pass": 50}, "p: expected a number"),
        ({"surprise": 1, "generation": 2, "at_pass": 50}, "surprise: no such setting"),
        ({"generation": 2, "at_pass": "soon"}, "at_pass: expected an integer, or null"),
        ({"k0": 3, "generation": 0, "at_pass": 50}, "generation 0 is not above 1"),
        ({"k0": 3, "generation": 2, "at_pass": 10}, "at_pass 10 is over: pass 10 has begun"),
        ({"k0": 3, "stats": True, "generation": 2, "at_pass": 50}, "stats is taken at the server's start"),
    ],
)
def test_what_is_not_fit_keeps_the_old(
    settings: dict[str, Any], why: str, install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """One fault, and nothing of the file is taken; the beacon says which."""
    runtime = fresh(k0=2)
    run(runtime, 10)
    refused = offer(runtime, install(), **settings)
    assert why in refused["why"]
    assert refused == runtime._NOW.tell()["refused"]
    run(runtime, 60)
    assert k0(runtime) == 2
    assert runtime._NOW.tell()["in_force"] == {"generation": 1, "from_pass": 0}


def test_a_file_without_a_pass_is_for_servers_that_start(
    install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """A running process leaves such a file alone, without complaint."""
    runtime = fresh(k0=2)
    run(runtime, 10)
    assert offer(runtime, install(), k0=5, generation=2) is None
    run(runtime, 60)
    assert (k0(runtime), runtime._NOW.tell()["armed"]) == (2, None)


def test_the_environment_goes_before_the_file(
    install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """A server started with SGLANG_OEA_K0 cannot be told otherwise by the file, and says so."""
    runtime = fresh(k0=2)
    installed = install()
    installed.write(k0=5, generation=2, at_pass=50)
    runtime._NOW.arm(runtime._settings.read_settings(installed.settings, {"SGLANG_OEA_K0": "2"}))
    assert "SGLANG_OEA_K0 in the server's environment goes before the file" in runtime._NOW.refused["why"]


def test_off_and_on_again(install: Callable[..., Installed], fresh: Callable[..., ModuleType]) -> None:
    """The switch works while serving; off leaves every pass alone."""
    runtime, installed = fresh(k0=2), install()
    assert offer(runtime, installed, k0=2, enabled=False, generation=2, at_pass=5) is None
    run(runtime, 5)
    assert k0(runtime) == runtime._operator.UNTOUCHED
    assert runtime._NOW.tell()["state"] == "off"
    assert offer(runtime, installed, k0=2, generation=3, at_pass=9) is None
    run(runtime, 9)
    assert (k0(runtime), runtime._NOW.tell()["state"]) == (2, "on")


def test_a_newer_file_takes_the_place_of_one_that_waits(
    install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """So a change that other ranks refused can be called off."""
    runtime, installed = fresh(k0=2), install()
    assert offer(runtime, installed, k0=5, generation=2, at_pass=20) is None
    assert offer(runtime, installed, k0=2, generation=3, at_pass=40) is None
    run(runtime, 30)
    assert k0(runtime) == 2
    run(runtime, 40)
    assert runtime._NOW.tell()["in_force"] == {"generation": 3, "from_pass": 40}


def test_the_file_from_before_calls_a_change_off(
    install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """The very bytes are restored, generation and all: what is armed goes, and nothing is refused."""
    runtime, installed = fresh(k0=2), install()
    assert offer(runtime, installed, k0=5, generation=2, at_pass=20) is None
    assert runtime._NOW.tell()["armed"] is not None
    assert offer(runtime, installed, k0=2, generation=1) is None
    assert runtime._NOW.tell()["armed"] is None
    run(runtime, 30)
    assert k0(runtime) == 2
    assert offer(runtime, installed, k0=5, generation=2, at_pass=40) is None
    run(runtime, 50)
    assert k0(runtime) == 5


def test_no_pass_is_missed_however_close_the_race(
    install: Callable[..., Installed], fresh: Callable[..., ModuleType]
) -> None:
    """Arming races against passes: each time it is either in force from exactly that pass, or refused."""
    runtime, installed = fresh(k0=2), install()
    number, generation = 0, 1
    outcomes = set()
    for trial in range(60):
        generation += 1
        installed.write(k0=2 + trial % 3, generation=generation, at_pass=number + 40)
        loaded = runtime._settings.read_settings(installed.settings, {})
        runtime._NOW.refused = None
        arming = threading.Timer(trial * 2e-5, runtime._NOW.arm, (loaded,))
        arming.start()
        run(runtime, number + 80)
        arming.join()
        taken = runtime._NOW.from_pass == number + 40
        assert taken == (runtime._NOW.refused is None), trial
        assert runtime._NOW.armed is None
        outcomes.add(taken)
        number = runtime._NOW.number
    assert outcomes  # which of the two come up depends on the machine
