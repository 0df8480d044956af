"""``surgeon bench smoke``."""

from __future__ import annotations

from typing import Annotated

import typer

from surgeon.cli.session import Session, with_session

group = typer.Typer(no_args_is_help=True, help="Put load on the running server.")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="bench")


@group.command("smoke")
@with_session("bench smoke")
def smoke(
    session: Session,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="How many requests.")] = 32,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="How many at a time.")] = 8,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt.")] = 64,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens of each answer.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Of the random prompts.")] = 1,
) -> None:
    """Run sglang's own serving benchmark, briefly and offline: is it serving right?"""
    from surgeon import patches
    from surgeon.bench.smoke import Load
    from surgeon.cli import describe
    from surgeon.cli.apply import describe_smoke
    from surgeon.errors import GateFailedError
    from surgeon.operations import bench

    load = Load(prompts=prompts, input_len=input_len, output_len=output_len, concurrency=concurrency, seed=seed)
    with session.connect() as node:
        outcome = bench.smoke(node, session.target, patches.load("oea"), session.sink, load)
    passed = outcome.result.passed
    session.sink.answer(
        {"smoke": describe.smoke_json(outcome.result), "unpatched": describe.smoke_json(outcome.before)},
        lambda: [describe_smoke(outcome.result, outcome.before)] if passed else [],
        ok=passed,
    )
    if not passed and not session.sink.as_json:
        raise GateFailedError(
            "; ".join(outcome.result.problems), advice="see `surgeon logs`; nothing was changed", code="smoke-failed"
        )
    if not passed:
        raise typer.Exit(GateFailedError.exit_code)
