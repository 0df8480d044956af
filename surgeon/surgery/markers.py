"""What a graft looks like in the file: two marked blocks that say who put them there and how they go away."""

from __future__ import annotations

import re
from dataclasses import dataclass

from surgeon.errors import UsageError
from surgeon.surgery.places import EXPERTS, PLACES, Place
from surgeon.surgery.text import split_bom, split_lines

_WORD = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_TRACE = re.compile(rb"[ \t\f]*#[ \t]*(?:>>>|<<<)[ \t]*surgeon\b")
_BEGIN = re.compile(rf"# >>> surgeon ({_WORD}) ({_WORD}) ({_WORD}): removed by `surgeon rollback`")
_IMPORT = re.compile(r"from ([\w.]+) import (\w+)")
_TEST = re.compile(r"if (\w+)\.(\w+):")
_NAMES = r"\w+(?:, \w+)*"
_CALL = re.compile(rf"(?:({_NAMES}) = )?(\w+)\.(\w+)\((?:({_NAMES})\))?")
_WANT = re.compile(r"(\w+)=(\w+),")


@dataclass(frozen=True)
class GraftSpec:
    """What to graft.

    Attributes:
        patch: the patch's name.
        version: its version.
        stamp: twelve or so characters that tell one build of it from another.
        package: the package that holds the runtime module.
        module: the runtime module.
        function: the function of it that is called.
        flag: the attribute of it that must be true for the call to happen.
        wants: names to pass on as keyword arguments where they are bound.
        place: where the call goes; it says what the call gets by position and which names its answer replaces.

    Raises:
        UsageError: a field would not make valid Python or a readable marker.
    """

    patch: str
    version: str
    stamp: str
    package: str = "sglang.srt.layers.moe"
    module: str = "_surgeon_oea"
    function: str = "route"
    flag: str = "active"
    wants: tuple[str, ...] = ()
    place: Place = EXPERTS

    def __post_init__(self) -> None:
        """Refuse what could not be found again in the file, or would not compile."""
        identifiers = (*self.package.split("."), self.module, self.function, self.flag, *self.wants)
        bad = [name for name in identifiers if not name.isidentifier() or not name.isascii()]
        bad += [w for w in (self.patch, self.version, self.stamp) if not re.fullmatch(_WORD, w, re.ASCII)]
        bad += [name for name in self.wants if self.wants.count(name) > 1 or name in self.place.needs]
        if bad:
            raise UsageError(
                f"A graft needs plain names, each once; found {bad[0]!r}.",
                advice="Correct the patch's patch.toml.",
                where=self.patch,
            )


@dataclass(frozen=True)
class Block:
    """One marked block.

    Attributes:
        first: its first line, counted from 0.
        last: the line after its last.
    """

    first: int
    last: int


@dataclass(frozen=True)
class Marked:
    """The two blocks of a graft, exactly as it wrote them.

    Attributes:
        spec: what was grafted; `wants` are the names that are passed.
        imports: the block at module level.
        call: the block at the site.
    """

    spec: GraftSpec
    imports: Block
    call: Block


@dataclass(frozen=True)
class Broken:
    """Marks of surgeon that do not make up a graft as it writes one.

    Attributes:
        reason: what was expected and what was found.
        line: where, counted from 1.
        text: that line.
        spec: what the marks still say about the graft, if anything.
    """

    reason: str
    line: int
    text: str
    spec: GraftSpec | None


def import_block(spec: GraftSpec, newline: str) -> str:
    """The block at module level; the two blank lines that part it from the function below belong to it.

    Args:
        spec: what to graft.
        newline: the line end to use.
    """
    lines = (_begin(spec), f"from {spec.package} import {spec.module}", _end(spec), "", "")
    return "".join(line + newline for line in lines)


def call_block(spec: GraftSpec, indent: str, step: str, newline: str) -> str:
    """The block at the site. With the flag off, it costs one attribute look-up.

    Args:
        spec: what to graft; `wants` holds the names to pass, all of them bound at the site.
        indent: the indentation of the site.
        step: what one more level adds.
        newline: the line end to use.
    """
    names = ", ".join(spec.place.assigns)
    call = f"{names} = {spec.module}.{spec.function}(" if names else f"{spec.module}.{spec.function}("
    if spec.wants:
        arguments = (*(f"{name}," for name in spec.place.needs), *(f"{name}={name}," for name in spec.wants))
        written = (call, *(f"{step}{argument}" for argument in arguments), ")")
    else:
        written = (f"{call}{', '.join(spec.place.needs)})",)
    lines = (_begin(spec), f"if {spec.module}.{spec.flag}:", *(step + line for line in written), _end(spec))
    return "".join(indent + line + newline for line in lines)


def _begin(spec: GraftSpec) -> str:
    return f"# >>> surgeon {spec.patch} {spec.version} {spec.stamp}: removed by `surgeon rollback`"


def _end(spec: GraftSpec) -> str:
    return f"# <<< surgeon {spec.patch}"


def scan(source: bytes) -> Marked | Broken | None:
    """Look for the blocks of a graft.

    Args:
        source: the file.

    Returns:
        None if nothing in the file says surgeon was there.
    """
    lines = split_lines(split_bom(source)[1])
    traces = [number for number, line in enumerate(lines) if _TRACE.match(line)]
    return _Reader(lines, traces).read() if traces else None


class _Reader:
    """Recovers what was grafted from the text, writes it again, and compares."""

    def __init__(self, lines: tuple[bytes, ...], traces: list[int]) -> None:
        self._lines = lines
        self._traces = traces
        self._spec: GraftSpec | None = None

    def read(self) -> Marked | Broken:
        header = _BEGIN.fullmatch(self._content(self._traces[0]).strip())
        if header is None:
            return self._broken("a begin mark `# >>> surgeon PATCH VERSION STAMP: ...` is expected", self._traces[0])
        self._spec = GraftSpec(header[1], header[2], header[3])
        if len(self._traces) != len((">>>", "<<<", ">>>", "<<<")):
            return self._broken(
                f"a graft has two blocks with a begin and an end each; found {len(self._traces)} marks",
                self._traces[-1],
            )
        spec = self._recover(self._spec)
        if isinstance(spec, Broken):
            return spec
        return self._compare(spec)

    def _recover(self, named: GraftSpec) -> GraftSpec | Broken:
        first = self._traces[0] + 1
        imported = _IMPORT.fullmatch(self._content(first).strip())
        if imported is None:
            return self._broken("the import of the runtime is expected", first)
        begin, end = self._traces[2:]
        inside = [self._content(number).strip() for number in range(begin + 1, end)]
        test = _TEST.fullmatch(inside[0]) if inside else None
        if test is None:
            return self._broken("the test of the patch's flag is expected", begin + 1)
        call = _CALL.fullmatch(inside[1]) if len(inside) > 1 else None
        if call is None:
            return self._broken("the call of the patch is expected", begin + 2)
        place = next((place for place in PLACES if ", ".join(place.assigns) == (call[1] or "")), None)
        if place is None:
            return self._broken("the call of the patch is expected", begin + 2)
        offset = 2 + len(place.needs)
        wants = [_WANT.fullmatch(text) for text in inside[offset:-1]] if call[4] is None else []
        for number, want in enumerate(wants, begin + 1 + offset):
            if want is None or want[1] != want[2]:
                return self._broken("an argument `name=name,` is expected", number)
        try:
            return GraftSpec(
                named.patch,
                named.version,
                named.stamp,
                package=imported[1],
                module=imported[2],
                function=call[3],
                flag=test[2],
                wants=tuple(want[1] for want in wants if want is not None),
                place=place,
            )
        except UsageError as error:
            return self._broken(error.message, begin)

    def _compare(self, spec: GraftSpec) -> Marked | Broken:
        top, site = self._traces[0], self._traces[2]
        above = import_block(spec, self._newline(top))
        indent = self._indent(site)
        step = self._indent(site + 2).removeprefix(indent)
        below = call_block(spec, indent, step, self._newline(site))
        blocks = []
        for first, text in ((top, above), (site, below)):
            expected = split_lines(text.encode("ascii"))
            for number, line in enumerate(expected, first):
                if number >= len(self._lines) or self._lines[number] != line:
                    wanted = line.decode("ascii").strip() or "a blank line"
                    return self._broken(f"`{wanted}` is expected", min(number, len(self._lines) - 1))
            blocks.append(Block(first, first + len(expected)))
        return Marked(spec, *blocks)

    def _content(self, number: int) -> str:
        return self._lines[number].decode("utf-8", "replace").rstrip("\r\n") if number < len(self._lines) else ""

    def _indent(self, number: int) -> str:
        text = self._content(number)
        return text[: len(text) - len(text.lstrip(" \t"))]

    def _newline(self, number: int) -> str:
        line = self._lines[number]
        return line[len(line.rstrip(b"\r\n")) :].decode("ascii")

    def _broken(self, reason: str, number: int) -> Broken:
        text = self._content(number)
        return Broken(f"{reason}; line {number + 1} is `{text.strip()}`", number + 1, text, self._spec)
