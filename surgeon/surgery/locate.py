"""Find the place in topk.py where a patch of the expert selection goes in, or say why there is none.

LibCST is imported only when a file has to be searched: a file whose marks tell, or whose site is known, needs none.
"""

from __future__ import annotations

import functools

from surgeon.surgery import markers
from surgeon.surgery.outcomes import AlreadyGrafted, Found, Outcome

_known: dict[bytes, Found] = {}


def know(source: bytes, site: Found) -> None:
    """Tell of a site that an earlier search found in this very file, so that it need not be searched again.

    A graft is proved on its result all the same, by another parser than the one that searched.
    """
    _known[source] = site


@functools.lru_cache(maxsize=8)
def locate(source: bytes) -> Outcome:
    """Find the site in one version of topk.py.

    Args:
        source: the file as it is on the node.

    Returns:
        What is there; nothing that a file can hold makes it raise.
    """
    marked = markers.scan(source)
    if marked is not None:
        return _already(marked)
    if source in _known:
        return _known[source]
    from surgeon.surgery.search import search

    return search(source)


def _already(marked: markers.Marked | markers.Broken) -> AlreadyGrafted:
    spec = marked.spec
    named = (spec.patch, spec.version, spec.stamp) if spec is not None else ("", "", "")
    if isinstance(marked, markers.Broken):
        return AlreadyGrafted(*named, (), (range(marked.line, marked.line + 1),), marked.reason)
    blocks = tuple(range(block.first + 1, block.last + 1) for block in (marked.imports, marked.call))
    return AlreadyGrafted(*named, marked.spec.wants, blocks, "")
