"""Run the smoke benchmark on a node and keep its result there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from surgeon.bench.smoke import CODE, Load, SmokeResult, read_run
from surgeon.operations import lease

if TYPE_CHECKING:
    from surgeon.node.client import Node
    from surgeon.operations.observer import Observer
    from surgeon.operations.survey import Survey
    from surgeon.server.model import Server

DEADLINE_S: Final = 900.0


def run(
    node: Node, seen: Survey, server: Server, observer: Observer, *, patched: str, load: Load | None = None
) -> SmokeResult:
    """Run sglang's serving benchmark against a server and record the result on the node.

    Args:
        node: where.
        seen: a survey of it.
        server: the running server.
        observer: is told.
        patched: what is live, for the record; empty for the unpatched server.
        load: what is asked of it.
    """
    load = load or Load()
    if node.lease is not None:
        # Nobody may take a long benchmark for an abandoned change, and undo it.
        lease.renew(node, seen.installed.site_id, busy_s=DEADLINE_S)
    title = f"Smoke benchmark: {load.prompts} requests, {load.concurrency} at a time"
    with observer.step(title) as step:
        answer = node.call(
            "run",
            {
                "code": CODE,
                "argv": load.argv(port=server.port, model=server.model_path),
                "pid": server.pid,
                "python": seen.installed.python,
                "timeout_s": DEADLINE_S,
            },
            deadline_s=DEADLINE_S + 10,
        )
        result = read_run(
            answer["stdout"],
            answer["stderr"],
            int(answer["returncode"]),
            load,
            when=float(seen.node.get("time") or 0.0),
            patched=patched,
            version=seen.installed.version,
        )
        site_id = seen.installed.site_id
        node.call(
            "document", {"site_id": site_id, "name": "smoke", "value": result.to_json(), "append": True, "keep": 50}
        )
        if result.passed:
            step.done(f"{result.output_tok_s:.0f} tok/s, {result.tokens} tokens by the server's count")
        else:
            step.failed("; ".join(result.problems))
    return result
