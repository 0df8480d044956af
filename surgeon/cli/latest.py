"""The newest release in words and in JSON, for ``surgeon inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgeon.operations.latest import Latest, NotKnown


def rows(found: Latest | NotKnown | None, *, everything: bool) -> list[tuple[str, str]]:
    """How far behind, where that was asked, and whether the patch fits the newest one too.

    Args:
        found: what was found; None if it was not asked for.
        everything: with the names that the patch would be passed.

    Returns:
        Rows of a table: what it is about, and markup.
    """
    from surgeon.cli import describe
    from surgeon.operations.latest import NotKnown

    match found:
        case None:
            return [("newest", "[dim]not asked for: --check-latest[/dim]")]
        case NotKnown():
            return [("newest", "[yellow]not known[/yellow]: no package index could be asked")]
    asked = f"[dim](asked {describe.escape(found.index)}, {found.whose} index)[/dim]"
    told = [("newest", f"{_distance(found)} {asked}"), (f"in {found.version}", _fit(found, everything=everything))]
    if found.live is not None:
        told.append(("", f"live path, if launched anew: {describe.live_text(found.live)}"))
    return told


def _distance(found: Latest) -> str:
    if found.behind is None:
        return f"{found.installed} is no release; the newest is {found.version}"
    if found.behind == 0:
        same = "the newest" if found.installed == found.version else f"newer than the newest, {found.version}"
        return f"{found.installed} is {same}"
    return f"{found.installed} is {found.behind} release{'s' if found.behind > 1 else ''} behind {found.version}"


def _fit(found: Latest, *, everything: bool) -> str:
    from surgeon import surgery
    from surgeon.cli import describe

    if isinstance(found.located, surgery.NotNeeded):
        return f"the patch is not needed: {describe.escape(found.located.reason)}"
    if found.misfit or not isinstance(found.located, surgery.Found):
        return f"[red]the patch does not fit[/red]: {describe.escape(found.misfit)}"
    names = f"passed {', '.join(found.names)}" if everything else f"{len(found.names)} names passed"
    where = f"line {found.located.line}, recipe {describe.escape(found.located.recipe)}, {names}"
    return f"the patch fits{' too' if found.behind else ''} [dim]({where})[/dim]"


def warnings(found: Latest | NotKnown | None) -> tuple[str, ...]:
    """What went wrong while asking."""
    from surgeon.operations.latest import NotKnown

    match found:
        case None:
            return ()
        case NotKnown():
            return tuple(f"the newest release is not known: {why}" for why in found.why)
    return found.warnings


def to_json(found: Latest | NotKnown | None) -> dict[str, Any] | None:
    """The newest release as ``--json`` carries it; None if it was not asked for."""
    from surgeon.cli import describe
    from surgeon.operations.latest import NotKnown

    match found:
        case None:
            return None
        case NotKnown():
            return {"known": False, "why": list(found.why)}
    return {
        "known": True,
        "index": found.index,
        "whose": found.whose,
        "named_by": found.source or None,
        "installed": found.installed,
        "version": found.version,
        "behind": found.behind,
        "fits": not found.misfit,
        "misfit": found.misfit or None,
        "site": describe.site_json(found.located),
        "names": list(found.names),
        "live_path": describe.live_json(found.live),
        "warnings": list(found.warnings),
    }
