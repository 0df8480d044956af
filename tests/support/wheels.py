"""topk.py from real sglang wheels, and a sandbox that runs its `select_experts` without torch."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
import types
import zipfile
from typing import TYPE_CHECKING, Any, Self

from surgeon.registry.wheels import fetch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

TOPK = "sglang/srt/layers/moe/topk.py"


@functools.cache
def member(version: str, path: str = TOPK) -> bytes:
    """One file of a release's wheel, as it is in there.

    Args:
        version: the sglang release.
        path: inside the wheel.
    """
    with zipfile.ZipFile(fetch(version)) as archive:
        return archive.read(path)


class Wild:
    """Stands for a tensor, a module or a function: takes any operation, and tosses a coin where a truth is asked."""

    def __init__(self, coin: random.Random) -> None:
        self._coin = coin

    def __getattr__(self, name: str) -> Wild:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> Wild:
        """Any call gives the same thing back."""
        return self

    def __getitem__(self, _: object) -> Wild:
        return self

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def __iter__(self) -> Iterator[Wild]:
        return iter((self, self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        return self._coin.random() < 0.5

    def _same(self, _: object) -> Wild:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __imul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __or__ = __ror__ = _same

    def __eq__(self, other: object) -> bool:
        return bool(self)

    def __ne__(self, other: object) -> bool:
        return bool(self)

    def __hash__(self) -> int:
        return id(self)


class _Imported:
    """Whatever module is imported: its names are those of the globals."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space

    def __getattr__(self, name: str) -> Any:
        return self._space[name]


class _Globals(dict[str, Any]):
    """Module globals in which every name that is not there is wild, imports inside functions too."""

    def __init__(self, coin: random.Random, known: dict[str, Any]) -> None:
        found = {**vars(builtins), "__import__": lambda *_: _Imported(self)}
        super().__init__(known, __builtins__=found, __name__="wild")
        self._coin = coin

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name) if hasattr(builtins, name) else Wild(self._coin)


class Choosy(Wild):
    """A configuration whose fields are sometimes None, sometimes a value, and the same all through one run."""

    def __init__(self, coin: random.Random) -> None:
        super().__init__(coin)
        self._fields: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values: tuple[Any, ...] = (None, Wild(self._coin))
        if name.startswith(("num_", "top_k", "correction_bias_for")) and name != "num_expert_group":
            values = (Wild(self._coin),)
        elif name == "scoring_func":
            values = ("sigmoid", "softmax", "sqrtsoftplus")
        return self._fields.setdefault(name, self._coin.choice(values))


def definition(source: bytes, name: str) -> ast.FunctionDef:
    """A module-level function's syntax tree, by Python's own parser.

    Args:
        source: the module.
        name: the function.
    """
    found = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1
    return found[0]


@functools.cache
def _compiled(source: bytes, names: frozenset[str]) -> types.CodeType:
    future = ast.parse("from __future__ import annotations").body
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", None) in names]
    assert len(wanted) == len(names)
    return compile(ast.fix_missing_locations(ast.Module([*future, *wanted], [])), "wheel", "exec")


def runnable(source: bytes, names: set[str], coin: random.Random, known: dict[str, Any]) -> types.SimpleNamespace:
    """Some of a module's functions and classes, to run where everything around them is wild.

    Args:
        source: the module.
        names: which ones; all of them must be there, once.
        coin: decides the truths.
        known: globals that are not wild.
    """
    space = _Globals(coin, known)
    exec(_compiled(source, frozenset(names)), space)  # noqa: S102 - running sglang's own code is the test
    return types.SimpleNamespace(**{name: space[name] for name in names})


def arguments_of(function: Callable[..., Any], coin: random.Random) -> dict[str, Any]:
    """Arguments for every parameter of `select_experts`, some of them None.

    Args:
        function: the function.
        coin: decides them.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    always = {"hidden_states", "router_logits"}
    return {
        name: Choosy(coin)
        if name == "topk_config"
        else coin.choice((Wild(coin), None))
        if name not in always
        else Wild(coin)
        for name in names
    }


def caller_locals(depth: int = 2) -> dict[str, Any]:
    """The local variables of the function that called the caller.

    Args:
        depth: how many frames up.
    """
    return dict(sys._getframe(depth).f_locals)
