"""Find the site of a patch in one of sglang's files, or say why there is none.

LibCST is imported only when a file has to be searched: a file whose marks tell, or whose site is known, needs none.
"""

from __future__ import annotations

import functools

from surgeon.surgery import markers
from surgeon.surgery.outcomes import AlreadyGrafted, Found, Outcome
from surgeon.surgery.places import EXPERTS, Place
from surgeon.surgery.upstream import not_needed

_known: dict[tuple[bytes, Place], Found] = {}


def know(source: bytes, site: Found, place: Place = EXPERTS) -> None:
    """Tell of a site that an earlier search found in this very file, so that it need not be searched again.

    A graft is proved on its result all the same, by another parser than the one that searched.
    """
    _known[source, place] = site


def locate(source: bytes, place: Place = EXPERTS) -> Outcome:
    """Find the site in one version of a place's file.

    Args:
        source: the file as it is on the node.
        place: which place to look for.

    Returns:
        What is there; nothing that a file can hold makes it raise.
    """
    return _locate(source, place)


@functools.lru_cache(maxsize=8)
def _locate(source: bytes, place: Place) -> Outcome:
    marked = markers.scan(source)
    if marked is not None:
        return _already(marked, place)
    if (source, place) in _known:
        return _known[source, place]
    if place == EXPERTS:
        upstream = not_needed(source)
        if upstream is not None:
            return upstream
    from surgeon.surgery import guard

    return guard.search(source, place)


def _already(marked: markers.Marked | markers.Broken, place: Place) -> AlreadyGrafted:
    spec = marked.spec
    named = (spec.patch, spec.version, spec.stamp) if spec is not None else ("", "", "")
    if isinstance(marked, markers.Broken):
        return AlreadyGrafted(*named, (), (range(marked.line, marked.line + 1),), marked.reason)
    blocks = tuple(range(block.first + 1, block.last + 1) for block in (marked.imports, marked.call))
    there = marked.spec.place
    problem = "" if there == place else f"a graft in `{place.label}` is expected, this one is `{there.label}`'s"
    return AlreadyGrafted(*named, marked.spec.wants, blocks, problem)
