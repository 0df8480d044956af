"""Stand-ins for whatever is imported and not run: they take any operation, but never decide a branch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import zipfile
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class UndecidedError(Exception):
    """A stand-in was asked for a truth, a number or its items: what it stands for would have to be said."""


class LeafReached(BaseException):
    """A kernel or a tensor operation was called that computes the choice of experts."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def by_tensors() -> str:
    """The name of a choice that topk.py computes with tensor operations: that of its function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.endswith("/moe/topk.py"):
        frame = frame.f_back
    return frame.f_code.co_name


class Base:
    """What a class inherits from in place of a class that is not there."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __init_subclass__(cls, **_: object) -> None:
        pass


class Absent:
    """Marks a name that the machine does not have."""


ABSENT = Absent()


class World:
    """What the stand-ins are and answer.

    Attributes:
        known: full dotted names (`torch.cuda.is_available`), `*.name` for that attribute anywhere, or `=name` for a
            function of sglang's that is replaced where it is run; and what is there.
        leaves: prefixes of dotted names whose call ends the run.
        armed: whether they do so now.
    """

    def __init__(self, known: Mapping[str, Any], leaves: Sequence[str]) -> None:
        self.known = dict(known)
        self.leaves = tuple(leaves)
        self.armed = False

    def attribute(self, owner: str, name: str) -> Any:
        """What `owner.name` is.

        Raises:
            AttributeError: the machine does not have it.
        """
        path = f"{owner}.{name}"
        if path in self.known:
            found = self.known[path]
        elif f"*.{name}" in self.known:
            found = self.known[f"*.{name}"]
        elif owner.startswith("sglang.") and name in vars(sys.modules.get("sglang.srt.utils", object)):
            return vars(sys.modules["sglang.srt.utils"])[name]  # what a module of sglang has from there
        elif name.endswith(("Error", "Exception")):
            found = self.known[f"*.{name}"] = type(name, (Exception,), {})
        else:
            return Standin(self, path)
        if found is ABSENT:
            raise AttributeError(path)
        return found


class Standin:
    """Stands for a module's function, class, constant or value that is not run."""

    def __init__(self, world: World, path: str) -> None:
        self.__dict__["_world"] = world
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> Any:
        if name in {"__name__", "__qualname__"}:
            return self._path.rpartition(".")[2]
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return self._world.attribute(self._path, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorators give back what they decorate; a leaf ends the run; anything else gives a stand-in."""
        if self._world.armed and self._path.startswith(self._world.leaves):
            raise LeafReached(self._path if not self._path.startswith("torch.") else by_tensors())
        if (
            len(args) == 1
            and not kwargs
            and isinstance(args[0], types.FunctionType | type | staticmethod | classmethod)
        ):
            return args[0]
        return Standin(self._world, f"{self._path}()")

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (Base,)

    def __instancecheck__(self, _: object) -> bool:
        return False

    def __subclasscheck__(self, _: type) -> bool:
        return False

    def __getitem__(self, key: object) -> Standin:
        return Standin(self._world, f"{self._path}[{key!r}]")

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self._path}>"

    def _new(self, *_: object) -> Standin:
        return Standin(self._world, f"op({self._path})")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _new
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __neg__ = __invert__ = _new
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = _new
    __lt__ = __le__ = __gt__ = __ge__ = _new

    def __eq__(self, other: object) -> Any:
        """Two names of things are the same or not; what a call or an index gave is not known."""
        plain = not {"(", "["} & set(self._path)
        if self is other or (isinstance(other, Standin) and self._path == other._path):
            return True
        if plain and not (isinstance(other, Standin) and {"(", "["} & set(other._path)):
            return False
        return Standin(self._world, f"eq({self._path})")

    def __ne__(self, other: object) -> Any:
        """The opposite of what `__eq__` knows."""
        same = self.__eq__(other)
        return same if isinstance(same, Standin) else not same

    def _undecided(self) -> UndecidedError:
        return UndecidedError(self._path)

    def __bool__(self) -> bool:
        raise self._undecided()

    def __index__(self) -> int:
        raise self._undecided()

    def __int__(self) -> int:
        raise self._undecided()

    def __float__(self) -> float:
        raise self._undecided()

    def __len__(self) -> int:
        raise self._undecided()

    def __iter__(self) -> Iterator[Any]:
        raise self._undecided()

    def __contains__(self, _: object) -> bool:
        raise self._undecided()


class StandinModule(types.ModuleType):
    """A module all of whose names are stand-ins."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.__dict__["_world"] = world

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        found = sys.modules[full] if full in sys.modules else self._world.attribute(self.__name__, name)
        self.__dict__[name] = found
        return found


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports some of a wheel's modules from the wheel itself, and stand-ins for every other module there is.

    Attributes:
        ran: the names of the wheel's modules that were run.
    """

    def __init__(
        self, path: Path, world: World, run: Sequence[str], installed: Sequence[str], absent: Sequence[str]
    ) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = frozenset(self._archive.namelist())
        self._folders = {name.rpartition("/")[0] for name in self._names}
        self._code: dict[str, types.CodeType] = {}
        self._run, self._installed, self._absent = tuple(run), tuple(installed), frozenset(absent)
        self.world = world
        self.ran: list[str] = []

    def find_spec(self, fullname: str, _: object = None, __: object = None) -> importlib.machinery.ModuleSpec | None:
        """The wheel's module, a stand-in, or None for the standard library, what is installed, and what is absent."""
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or top in self._installed or top in self._absent:
            return None
        if top != "sglang" or fullname in {"sglang", "sglang.srt"}:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        path = fullname.replace(".", "/")
        package = f"{path}/__init__.py" in self._names
        if not package and f"{path}.py" not in self._names:
            whole = any(folder == path or folder.startswith(f"{path}/") for folder in self._folders)
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if whole else None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=package)
        spec.origin = f"{path}/__init__.py" if package else f"{path}.py"
        spec.has_location = True
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """A stand-in, unless the module is one that is run."""
        return (
            None
            if spec.origin and (self._is_run(spec.name) or spec.origin in self._run)
            else StandinModule(self.world, spec.name)
        )

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the wheel's file, and put in what the machine answers in place of some of its functions."""
        spec = module.__spec__
        if isinstance(module, StandinModule) or spec is None or spec.origin is None:
            return
        if spec.origin not in self._code:
            source = self._archive.read(spec.origin)
            self._code[spec.origin] = compile(source, f"/wheel/{spec.origin}", "exec", dont_inherit=True)
        self.ran.append(spec.name)
        exec(self._code[spec.origin], module.__dict__)  # noqa: S102 - running sglang's own code is the point
        for found in vars(module).values():
            # What a quantization method allots decides nothing.
            if isinstance(found, type) and found.__module__ == module.__name__ and "create_weights" in vars(found):
                found.create_weights = lambda *_, **__: None  # type: ignore[attr-defined]
        for name in [name for name in vars(module) if f"={name}" in self.world.known]:
            module.__dict__[name] = self.world.known[f"={name}"]

    def _is_run(self, name: str) -> bool:
        return any(name == one or (one.endswith(".*") and name.startswith(one[:-1])) for one in self._run)
