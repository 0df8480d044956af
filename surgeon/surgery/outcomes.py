"""What looking for a site can come to."""

from __future__ import annotations

from dataclasses import dataclass

# What sglang calls the function that is cut into, and the three locals that the call replaces or reads.
FUNCTION = "select_experts"
IDS = "topk_ids"
WEIGHTS = "topk_weights"
LOGITS = "router_logits"


@dataclass(frozen=True)
class Line:
    """One line of the file, to show.

    Attributes:
        number: counted from 1.
        text: without its line end.
    """

    number: int
    text: str


@dataclass(frozen=True)
class Found:
    """The site.

    Attributes:
        recipe: the name of the recipe that fits.
        releases: the releases that recipe was seen to fit.
        function: the function that is cut into.
        line: the anchor's line, counted from 1.
        text: that line, without its line end.
        site: the line the graft goes in front of: the anchor, or the comments right above it, which are its own.
        import_site: the line the import goes in front of: the function, or the comments right above it.
        indent: the indentation at the site.
        step: what one more level of indentation adds.
        newline: the line end at the site.
        import_newline: the line end at the import's place.
        bound: local names that are certainly bound at the site.
    """

    recipe: str
    releases: str
    function: str
    line: int
    text: str
    site: int
    import_site: int
    indent: str
    step: str
    newline: str
    import_newline: str
    bound: frozenset[str]


@dataclass(frozen=True)
class AlreadyGrafted:
    """Surgeon's marks are in the file.

    Attributes:
        patch: the patch's name; empty if the marks do not say.
        version: its version; empty if the marks do not say.
        stamp: which build of it; empty if the marks do not say.
        passed: the names passed as keyword arguments.
        lines: the marked lines, counted from 1, one range per block.
        problem: what is wrong with the marks; empty if `ungraft` can take them out.
    """

    patch: str
    version: str
    stamp: str
    passed: tuple[str, ...]
    lines: tuple[range, ...]
    problem: str


@dataclass(frozen=True)
class NotNeeded:
    """Upstream does by now what the patch would do.

    Attributes:
        reason: what says so, in sentences.
        lines: where it is to be seen.
    """

    reason: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class NotFound:
    """No recipe fits.

    Attributes:
        reason: what was expected and what was found, in sentences.
        expected: the anchors that would have done.
        nearest: the nearest things that are there.
    """

    reason: str
    expected: tuple[str, ...]
    nearest: tuple[Line, ...]


@dataclass(frozen=True)
class Ambiguous:
    """More than one place would do, so none is certain.

    Attributes:
        reason: in sentences.
        candidates: the places.
    """

    reason: str
    candidates: tuple[Line, ...]


@dataclass(frozen=True)
class Unparsable:
    """LibCST cannot read the file, so nothing may be cut into it.

    Attributes:
        reason: what was expected and what was found.
        line: where LibCST gave up, counted from 1; None if it did not say.
        text: that line, decoded with replacement; may be empty.
    """

    reason: str
    line: int | None
    text: str


Outcome = Found | AlreadyGrafted | NotNeeded | NotFound | Ambiguous | Unparsable
