"""Options that a patch's settings become: one for each, with the help, range and choices of its patch.toml."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from surgeon import patches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PANEL: Final = "Settings of the patch"
_SWITCH: Final = "enabled"


def with_settings(patch: str, *, switch: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of a patch; it gets what was said as ``wanted``, None for the rest.

    Args:
        patch: its name.
        switch: whether there is ``--on/--off`` too. Without it the switch is no option: what is applied is on.
    """
    specs: Mapping[str, Mapping[str, Any]] = patches.describe(patch)["settings"]
    names = {name: spec for name, spec in specs.items() if switch or name != _SWITCH}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def wrapper(session: Any, **given: Any) -> None:
            wanted = {name: given.pop(name) for name in names}
            for name, spec in names.items():
                if spec["type"] == "schedule" and wanted[name] is not None:
                    wanted[name] = patches.read_schedule(wanted[name])
            if wanted.get("k0") is not None and any(wanted[n] for n, s in names.items() if s["type"] == "schedule"):
                raise typer.BadParameter("say --k0 or --schedule, not both")
            function(session, wanted=wanted, **given)

        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "wanted"]
        made = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=_option(name, spec), default=None)
            for name, spec in names.items()
        ]
        rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own[1:]]
        wrapper.__signature__ = inspect.Signature([own[0], *made, *rest])  # type: ignore[attr-defined]
        del wrapper.__wrapped__
        return wrapper

    return decorate


def _option(name: str, spec: Mapping[str, Any]) -> Any:
    """The annotation that makes Typer offer the setting; None stands for not said."""
    option = patches.option_of(name)
    help_, panel = str(spec["help"]).replace("[", "\\["), PANEL
    match spec["type"]:
        case "int":
            # 0 is a way to say off in the file; on the command line there is a switch for that.
            least = max(1, spec["min"]) if name == "k0" else spec["min"]
            return Annotated[
                int | None, typer.Option(option, min=least, max=spec["max"], help=help_, rich_help_panel=panel)
            ]
        case "float":
            return Annotated[
                float | None,
                typer.Option(option, min=spec["min"], max=spec["max"], help=help_, rich_help_panel=panel),
            ]
        case "bool":
            words = "--on/--off" if name == _SWITCH else f"{option}/--no-{option.removeprefix('--')}"
            return Annotated[bool | None, typer.Option(words, help=help_, rich_help_panel=panel)]
        case "schedule":
            return Annotated[str | None, typer.Option(option, metavar="ROWS:K0,...", help=help_, rich_help_panel=panel)]
    metavar = "|".join(spec.get("choices", ())) or None
    return Annotated[str | None, typer.Option(option, metavar=metavar, help=help_, rich_help_panel=panel)]
