"""The functions that choose experts as a call tree, for ``surgeon inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from surgeon.operations.inspect import Inspection
    from surgeon.surgery import Function
    from surgeon.surgery.calltree import Branch
    from surgeon.surgery.functions import Imported

_MARK = "●"
# So that most rows fit a terminal of 80 columns.
_NAME_WIDTH = 33


def render(found: Inspection, *, everything: bool) -> str:
    """Draw the tree, as markup.

    Args:
        found: what was found.
        everything: with decorators in full, modules in full, and the post-processing inside leaf functions.
    """
    from surgeon.surgery.calltree import call_tree

    rows = _Rows(found, everything=everything)
    rows.add(call_tree(found.functions, everything=everything))
    title = "functions that take part in choosing experts, and whom they call" + _legend(found)
    return "\n".join([title, *rows.lines])


def to_json(found: Inspection) -> list[dict[str, Any]]:
    """The map as ``--json`` carries it."""
    from surgeon.surgery.calltree import is_leaf

    on_path = _on_path(found)
    words = _words(found)
    return [
        {
            "name": f.name,
            "role": f.role,
            "first": f.line,
            "last": f.end,
            "decorators": list(f.decorators),
            "compiled": f.compiled,
            "calls": list(f.calls),
            "imported": [
                {
                    "name": one.name,
                    "modules": list(one.modules),
                    "role": one.role,
                    "on_live_path": f.name in on_path and is_leaf(one, words),
                }
                for one in f.imported
            ],
            "on_live_path": f.name in on_path,
        }
        for f in found.functions
    ]


class _Rows:
    """Lines of the tree: line numbers, the mark, the function under its caller, and what is to be said of it.

    They are no table: one long name would squeeze the last column of every row on a narrow terminal.
    """

    def __init__(self, found: Inspection, *, everything: bool) -> None:
        self.lines: list[str] = []
        self._everything = everything
        self._on_path = _on_path(found)
        self._words = _words(found)
        self._site = _site(found)
        self._width = max((len(_span(one)) for one in found.functions), default=0)
        self._called = {name for one in found.functions for name in one.calls}

    def add(self, branches: Sequence[Branch], guide: str = "", *, top: bool = True, caller_live: bool = True) -> None:
        """Add branches and what is below them."""
        from surgeon.surgery import Function
        from surgeon.surgery.calltree import is_leaf

        for at, branch in enumerate(branches):
            last = at == len(branches) - 1
            item = branch.item
            if isinstance(item, Function):
                live = item.name in self._on_path
                numbers, told = _span(item), self._function(branch, item, top=top)
            else:
                live = caller_live and is_leaf(item, self._words)
                numbers, told = "", self._imported(item)
            self._line(numbers, guide + ("" if top else "└ " if last else "├ "), item.name, told, live=live)
            below = guide if top else guide + ("  " if last else "│ ")
            self.add(branch.below, below, top=False, caller_live=live)

    def _line(self, numbers: str, guide: str, name: str, told: str, *, live: bool) -> None:
        pad = " " * (_NAME_WIDTH - len(guide) - len(name))
        mark = f"[green]{_MARK}[/green]" if live else " "
        shown = f"[bold]{name}[/bold]" if live else name
        self.lines.append(f"[dim]{numbers:>{self._width}}[/dim] {mark} [dim]{guide}[/dim]{shown}{pad} {told}")

    def _function(self, branch: Branch, item: Function, *, top: bool) -> str:
        from surgeon.cli import describe
        from surgeon.surgery.functions import DISPATCHER

        if branch.above:
            return f"{item.role} [dim](see above)[/dim]"
        parts = [item.role]
        if branch.to:
            parts[0] += f" [dim]→ {', '.join(name.rpartition('.')[2] for name in branch.to)}[/dim]"
        if self._site and self._site[0] == item.name:
            parts.append(f"[bold]{self._site[1]}[/bold]")
        decorators = item.decorators if self._everything else [_short(one) for one in item.decorators]
        parts += [f"[dim]@{describe.escape(one)}[/dim]" for one in decorators]
        if top and item.role != DISPATCHER and item.name not in self._called:
            parts.append("[dim]not called here[/dim]")
        if item.compiled and not any(one.startswith("torch.compile") for one in item.decorators):
            parts.append("[dim]torch.compile at its call[/dim]")
        return ", ".join(parts)

    def _imported(self, item: Imported) -> str:
        from surgeon.surgery.functions import KERNEL

        if not item.modules:
            return item.role
        kind = "kernel " if item.role == KERNEL else ""
        if self._everything:
            return f"{kind}[dim]from {' or '.join(item.modules)}[/dim]"
        others = f" or {len(item.modules) - 1} others" if len(item.modules) > 1 else ""
        return f"{kind}[dim]from {_package(item.modules[0])}{others}[/dim]"


def _span(function: Function) -> str:
    return f"{function.line}-{function.end}"


def _short(decorator: str) -> str:
    return decorator.partition("(")[0]


def _package(module: str) -> str:
    """As much of a module's name as tells whose it is."""
    parts = module.split(".")
    return ".".join(parts[: 3 if module.startswith("torch.ops.") else 2])


def _legend(found: Inspection) -> str:
    from surgeon import surgery

    if isinstance(found.live, surgery.Reached):
        return f"   [green]{_MARK}[/green] live"
    return ""


def _on_path(found: Inspection) -> frozenset[str]:
    from surgeon import surgery
    from surgeon.surgery import calltree

    if not isinstance(found.live, surgery.Reached):
        return frozenset()
    architecture = found.served.architecture if found.served else None
    return calltree.live(found.functions, found.live.leaf, found.device, architecture)


def _words(found: Inspection) -> frozenset[str]:
    from surgeon import surgery
    from surgeon.surgery import calltree

    return calltree.leaf_words(found.live.leaf) if isinstance(found.live, surgery.Reached) else frozenset()


def _site(found: Inspection) -> tuple[str, str] | None:
    """The function that holds the site, and what to say of it."""
    from surgeon import surgery
    from surgeon.surgery.outcomes import FUNCTION

    match found.located:
        case surgery.Found():
            return found.located.function, f"site at {found.located.line}"
        case surgery.AlreadyGrafted():
            return FUNCTION, "grafted"
    return None
