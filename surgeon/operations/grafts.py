"""The files that a patch is cut into, and what it can tell by each of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from surgeon.errors import SurgeonError
from surgeon.operations import memory

if TYPE_CHECKING:
    from surgeon.operations.survey import Survey, TargetFile
    from surgeon.patches import Patch
    from surgeon.surgery import Grafted, GraftSpec, Place
    from surgeon.surgery import Outcome as Located


@dataclass(frozen=True)
class DecodeGate:
    """How a patched server tells decode from prefill.

    Attributes:
        exact: by the forward mode of each batch; else by its number of rows alone.
        why: why only by rows; empty if exact.
    """

    exact: bool
    why: str = ""

    @property
    def name(self) -> str:
        """The word that beacons and ``--json`` use."""
        return "forward-mode" if self.exact else "row-count"


def look_at_runner(source: bytes | None, patch: Patch) -> tuple[Located | None, DecodeGate]:
    """What the locator finds in model_runner.py, and whether decode can be told from prefill by it.

    Args:
        source: the file; None if this sglang has none.
        patch: which may have no use for it.
    """
    from surgeon import surgery

    if not patch.announce:
        return None, DecodeGate(exact=False, why=f"{patch.name} {patch.version} knows no other way")
    if source is None:
        return None, DecodeGate(exact=False, why=f"this sglang has no {surgery.FORWARD.file}")
    located = memory.locate(source, surgery.FORWARD)
    if isinstance(located, surgery.Found | surgery.AlreadyGrafted):
        return located, DecodeGate(exact=True)
    return located, DecodeGate(exact=False, why=f"no place was found in {surgery.FORWARD.label}: {located.reason}")


@dataclass(frozen=True)
class Cut:
    """One file that gets a graft: as it is, without any graft, and with this one."""

    file: TargetFile
    original: bytes = field(repr=False)
    result: bytes = field(repr=False)


def cut_all(survey: Survey, patch: Patch, gate: DecodeGate) -> tuple[Cut, ...]:
    """Every file that gets a graft, in the order of writing: topk.py, without which nothing happens, comes last.

    Raises:
        DoesNotFitError: there is no site in topk.py, or it does not parse.
        ForeignEditError: somebody has edited an earlier graft.
    """
    from surgeon import surgery

    wanted = [(survey.file, surgery.EXPERTS)]
    if gate.exact and survey.runner is not None:
        wanted.insert(0, (survey.runner, surgery.FORWARD))
    cuts = []
    for file, place in wanted:
        original, grafted = cut(file.source, patch, file.path, place)
        cuts.append(Cut(file, original, grafted.result))
    return tuple(cuts)


def cut(source: bytes, patch: Patch, path: str, place: Place | None = None) -> tuple[bytes, Grafted]:
    """Take an earlier graft out of a file, and put this one in.

    Args:
        source: the file as it is.
        patch: what is cut in.
        path: the file's, for the refusals.
        place: which place in sglang the file is searched for; None for topk.py's.

    Returns:
        The file without any graft, and the grafted one.

    Raises:
        DoesNotFitError: there is no site, or the file does not parse.
        ForeignEditError: somebody has edited the earlier graft.
    """
    from surgeon import surgery

    place = place or surgery.EXPERTS
    try:
        grafted_before = isinstance(surgery.locate(source, place), surgery.AlreadyGrafted)
        original = surgery.ungraft(source) if grafted_before else source
        memory.locate(original, place)
        return original, surgery.graft(original, graft_spec(patch, place))
    except SurgeonError as error:
        error.message = f"{path}: {error.message}"
        error.where = f"{path}, {error.where}" if error.where else path
        raise


def graft_spec(patch: Patch, place: Place) -> GraftSpec:
    """What the patch has cut in at a place: the call that routes, or the one that announces each pass."""
    from surgeon import surgery

    spec = surgery.GraftSpec(
        patch=patch.name,
        version=patch.version,
        stamp=patch.stamp,
        package=patch.package,
        module=patch.module,
        place=place,
    )
    if place == surgery.FORWARD:
        return replace(spec, function=patch.announce, flag=patch.announce_flag)
    return replace(spec, wants=patch.wants)
