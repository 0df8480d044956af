"""Runs a release's grafted functions with everything around them stubbed, and watches what the calls get and give."""

from __future__ import annotations

import ast
import contextlib
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.support.wheels import Wild, arguments_of, caller_locals, runnable


class _Done(Exception):  # noqa: N818 - ends a run
    pass


@dataclass
class Seen:
    """One run that came to the site.

    Attributes:
        passed: what the call got by keyword; None if it was not called.
        names: the local variables of `select_experts` at the call; empty without one.
        onward: ids and weights as the anchor then took them.
    """

    passed: dict[str, object] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    onward: tuple[object, ...] = ()


def run_select_experts(source: bytes, seed: int, *, active: bool = True) -> Seen | None:
    """Run it once, on branches that the seed chooses.

    Args:
        source: a topk.py with the graft in.
        seed: of the coin.
        active: the runtime's switch.

    Returns:
        None if an assertion or a check of sglang's own ended the run first: those branches do not go together.
    """
    coin = random.Random(seed)  # noqa: S311 - a reproducible choice of branches
    seen = Seen()

    def route(weights: object, ids: object, logits: object, **passed: object) -> tuple[str, str]:
        assert seen.passed is None, "called twice"
        seen.passed, seen.names = passed, caller_locals()
        assert weights is seen.names["topk_weights"]
        assert ids is seen.names["topk_ids"]
        assert logits is seen.names["router_logits"]
        return "new weights", "new ids"

    def post_process(*, topk_ids: object, topk_weights: object, **_: object) -> object:
        seen.onward = (topk_ids, topk_weights)
        raise _Done

    class Recorder:
        def on_select_experts(self, *, topk_ids: object) -> None:
            seen.onward = (topk_ids, caller_locals()["topk_weights"])
            raise _Done

        def record_new_token(self, topk_ids: object) -> None:
            seen.onward = (topk_ids, caller_locals()["topk_weights"])
            raise _Done

    known = {
        "_surgeon_oea": SimpleNamespace(active=active, route=route),
        "_post_process_topk_ids": post_process,
        "get_global_expert_distribution_recorder": Recorder,
        "expert_distribution_recorder": Recorder(),
    }
    function = runnable(source, {"select_experts"}, coin, known).select_experts
    try:
        function(**arguments_of(function, coin))
    except _Done:
        return seen
    except (AssertionError, ValueError):
        if seen.passed is not None:
            raise
        return None
    message = "select_experts ended without passing on what it selected"
    raise AssertionError(message)


def run_forward(source: bytes, *, active: bool = True) -> list[bool] | None:
    """Run a grafted `ModelRunner.forward` up to the first thing that it does.

    Args:
        source: a model_runner.py with the graft in.
        active: the runtime's switch.

    Returns:
        Whether the announcement was given the runner itself, and the batch itself; None if something else came first,
        or nothing was announced.
    """
    heard: list[tuple[object, ...]] = []

    def announce(*given: object) -> None:
        heard.append(given)
        raise _Done

    class Untouched:
        def __getattribute__(self, name: str) -> Any:
            raise _Done

    (owner,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "ModelRunner"]
    (method,) = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {"_surgeon_oea": SimpleNamespace(active=active, announce=announce)}
    exec(compile(ast.Module([*future, method], []), "wheel", "exec"), space)  # noqa: S102 - sglang's own code
    runner, batch = Untouched(), Untouched()
    with contextlib.suppress(_Done):
        space["forward"](runner, batch)
    return [given is meant for given, meant in zip(heard[0], (runner, batch), strict=True)] if heard else None


def is_wild(value: object) -> bool:
    """Whether a value is one of the stubs', not the runtime's answer."""
    return isinstance(value, Wild)
