"""Graft and ungraft: every byte outside survives, whatever the file looks like, and damage is refused."""

from __future__ import annotations

import codecs
import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.errors import DoesNotFitError, ForeignEditError, UsageError
from surgeon.surgery import FORWARD, AlreadyGrafted, Found, GraftSpec, graft, locate, ungraft, unified_diff

SPEC = GraftSpec("oea", "0.1.0", "0123456789ab", wants=("top_k", "layer_id", "renormalize"))
PLAIN = b"""import os


def select_experts(hidden_states, router_logits, top_k, *, renormalize=True):
    topk_weights, topk_ids = os.leaf(router_logits)
    recorder().on_select_experts(topk_ids=topk_ids)
    return topk_weights, topk_ids
"""
GRAFTED = b"""import os


# >>> surgeon oea 0.1.0 0123456789ab: removed by `surgeon rollback`
from sglang.srt.layers.moe import _surgeon_oea
# <<< surgeon oea


def select_experts(hidden_states, router_logits, top_k, *, renormalize=True):
    topk_weights, topk_ids = os.leaf(router_logits)
    # >>> surgeon oea 0.1.0 0123456789ab: removed by `surgeon rollback`
    if _surgeon_oea.active:
        topk_weights, topk_ids = _surgeon_oea.route(
            topk_weights,
            topk_ids,
            router_logits,
            top_k=top_k,
            renormalize=renormalize,
        )
    # <<< surgeon oea
    recorder().on_select_experts(topk_ids=topk_ids)
    return topk_weights, topk_ids
"""


def test_the_graft_reads_like_this() -> None:
    """The whole result for a small module, written out."""
    grafted = graft(PLAIN, SPEC)
    assert grafted.result == GRAFTED
    assert grafted.spec.wants == ("top_k", "renormalize")
    assert grafted.inserted == (range(4, 9), range(11, 21))


RUNNER = b"""class ModelRunner:
  def forward(self, forward_batch):
    return self.model(forward_batch)
"""
ANNOUNCED = b"""# >>> surgeon oea 0.1.0 0123456789ab: removed by `surgeon rollback`
from sglang.srt.layers.moe import _surgeon_oea
# <<< surgeon oea


class ModelRunner:
  def forward(self, forward_batch):
    # >>> surgeon oea 0.1.0 0123456789ab: removed by `surgeon rollback`
    if _surgeon_oea.active:
      _surgeon_oea.announce(self, forward_batch)
    # <<< surgeon oea
    return self.model(forward_batch)
"""


def test_the_graft_in_a_method_reads_like_this() -> None:
    """A call without an answer and without keyword arguments stands on one line, indented as the class is."""
    spec = GraftSpec("oea", "0.1.0", "0123456789ab", function="announce", place=FORWARD)
    assert graft(RUNNER, spec).result == ANNOUNCED
    assert ungraft(ANNOUNCED) == RUNNER
    outcome = locate(ANNOUNCED, FORWARD)
    assert isinstance(outcome, AlreadyGrafted)
    assert outcome.problem == ""
    mistaken = locate(ANNOUNCED)
    assert isinstance(mistaken, AlreadyGrafted)
    assert mistaken.problem == "a graft in `select_experts` is expected, this one is `ModelRunner.forward`'s"


def test_a_damaged_call_in_a_method_is_a_foreign_edit() -> None:
    """What the call gets is part of the marked lines."""
    with pytest.raises(ForeignEditError, match=r"`_surgeon_oea\.announce\(self, forward_batch\)` is expected"):
        ungraft(ANNOUNCED.replace(b"announce(self, forward_batch)", b"announce(self, None)"))
    with pytest.raises(ForeignEditError, match="the call of the patch is expected"):
        ungraft(ANNOUNCED.replace(b"_surgeon_oea.announce", b"x = _surgeon_oea.announce"))


_NEWLINES = st.sampled_from(["\n", "\r\n", "\r"])
_INDENTS = st.sampled_from(["    ", "  ", "\t", "   "])


@st.composite
def _modules(draw: st.DrawFn) -> tuple[bytes, int]:
    """A module in some shape, and the line of its anchor."""
    step, form = draw(_INDENTS), draw(st.sampled_from(["utf-8", "bom", "latin-1"]))
    head = draw(
        st.sampled_from(
            [[], ["#!/usr/bin/env python"], ["'''Doc", "string é'''"], ["from __future__ import annotations"]]
        )
    )
    if form == "latin-1":
        at = 1 if head[:1] == ["#!/usr/bin/env python"] else 0
        head = [*head[:at], "# -*- coding: latin-1 -*-", *head[at:]]
    above = draw(
        st.lists(st.sampled_from(["", "x = 'é'", "# é", "\f", "if x:", "y = (1,", "   # odd indent"]), max_size=6)
    )
    filled = []
    for line in above:
        filled += {"if x:": [line, f"{step}pass"], "y = (1,": [line, "  2)"]}.get(line, [line])
    anchor = f"{step}recorder().on_select_experts(topk_ids=topk_ids)"
    between = draw(
        st.lists(
            st.sampled_from(["", f"{step}# comment", f"{step}\f", f"{step}z = 'é'", "# at the margin"]), max_size=5
        )
    )
    body = [f"{step}topk_weights, topk_ids = leaf(router_logits)", *between, anchor]
    tail = draw(
        st.sampled_from([[], [f"{step}return topk_weights, topk_ids"], [f"{step}return topk_ids", "", "z = 1"]])
    )
    lines = [*head, *filled, "def select_experts(router_logits, top_k):", *body, *tail]
    # Where only \r ends lines, LibCST does not find a coding cookie, and refuses.
    ends = draw(_NEWLINES.filter(lambda end: end != "\r" or form != "latin-1"))
    mixed = draw(st.booleans()) and ends != "\r"
    text = "".join(line + (draw(st.sampled_from(["\n", "\r\n"])) if mixed else ends) for line in lines)
    if draw(st.booleans()):
        text = text.rstrip("\r\n")
    encoded = text.encode("latin-1" if form == "latin-1" else "utf-8")
    return (codecs.BOM_UTF8 if form == "bom" else b"") + encoded, lines.index(anchor) + 1


@given(_modules())
@settings(max_examples=200, deadline=None)
def test_every_shape_of_file_survives(module: tuple[bytes, int]) -> None:
    """Line ends, tabs, byte order mark, cookie, form feeds, no newline at the end: nothing of it is lost.

    The site is found on the right line, the added lines end like their neighbours, difflib sees additions only, and
    ungraft gives every byte back.
    """
    source, anchor = module
    site = locate(source)
    assert isinstance(site, Found)
    assert site.line == anchor
    grafted = graft(source, SPEC)
    assert ungraft(grafted.result) == source
    before = source.splitlines(keepends=True)
    after = grafted.result.splitlines(keepends=True)
    kept = [line for line in difflib.ndiff([repr(x) for x in before], [repr(x) for x in after]) if line[0] in " -"]
    assert [line[2:] for line in kept] == [repr(x) for x in before]
    for block, expected in zip(grafted.inserted, (site.import_newline, site.newline), strict=True):
        ends = {after[number - 1][len(after[number - 1].rstrip(b"\r\n")) :] for number in block}
        assert ends == {expected.encode()}
        following = after[block.stop - 1]
        assert following.endswith(expected.encode()) or not following.endswith((b"\r", b"\n"))
    assert isinstance(locate(grafted.result), AlreadyGrafted)


def _edited(old: bytes, new: bytes) -> bytes:
    assert old in GRAFTED
    return GRAFTED.replace(old, new)


@pytest.mark.parametrize(
    ("source", "reason", "line"),
    [
        (
            _edited(b"    # <<< surgeon oea\n    rec", b"    rec"),
            "two blocks with a begin and an end each; found 3",
            11,
        ),
        (
            _edited(b"# >>> surgeon oea 0.1.0 0123456789ab: removed by `surgeon rollback`\nfrom", b"from"),
            "begin mark",
            5,
        ),
        (_edited(b"            top_k=top_k,\n", b"            top_k=4,\n"), "`name=name,`", 17),
        (_edited(b"            topk_ids,\n", b"            topk_ids[:1],\n"), "`topk_ids,` is expected", 15),
        (_edited(b"_surgeon_oea.active:", b"_surgeon_oea.active and top_k:"), "test of the patch's flag", 12),
        (
            _edited(b"if _surgeon_oea.active:", b"if _surgeon_other.active:"),
            "`if _surgeon_oea.active:` is expected",
            12,
        ),
        (_edited(b"        )\n    # <<<", b"        )\n        print(topk_ids)\n    # <<<"), "is expected", 19),
        (_edited(b"import _surgeon_oea\n", b"import _surgeon_oea as x\n"), "the import of the runtime", 5),
        (_edited(b"# <<< surgeon oea\n\n\n", b"# <<< surgeon oea\n\n"), "`a blank line` is expected", 8),
        (
            _edited(b"oea 0.1.0 0123456789ab: removed by `surgeon rollback`\n    if", b"oea 0.2.0 x: removed\n    if"),
            "is expected",
            11,
        ),
        (_edited(b"    # <<< surgeon oea\n", b"    # <<< surgeon oea \n"), "is expected", 20),
    ],
)
def test_a_damaged_graft_is_a_foreign_edit(source: bytes, reason: str, line: int) -> None:
    """Whatever somebody did to the marked lines, it is named with its line and nothing is taken out."""
    with pytest.raises(ForeignEditError, match="left as it is") as caught:
        ungraft(source)
    assert reason in caught.value.message
    assert caught.value.where == f"line {line}"
    outcome = locate(source)
    assert isinstance(outcome, AlreadyGrafted)
    assert reason in outcome.problem
    with pytest.raises(ForeignEditError):
        graft(source, SPEC)


def test_edits_elsewhere_in_the_file_do_not_hinder_ungraft() -> None:
    """Somebody else's change outside the marks is kept."""
    assert ungraft(_edited(b"import os\n", b"import os\nimport sys\n")) == PLAIN.replace(
        b"import os\n", b"import os\nimport sys\n"
    )


def test_a_file_turned_to_crlf_after_the_graft_is_still_taken_apart() -> None:
    """A checkout that changes all line ends changes those of the graft as well."""
    assert ungraft(GRAFTED.replace(b"\n", b"\r\n")) == PLAIN.replace(b"\n", b"\r\n")


def test_the_runtimes_name_outside_the_marks_is_a_foreign_edit() -> None:
    """A graft by hand, without marks, is not mistaken for a pristine file, nor left behind by ungraft."""
    stray = b"from sglang.srt.layers.moe import _surgeon_oea\n"
    with pytest.raises(ForeignEditError, match="only between surgeon's marks; line 1"):
        graft(stray + PLAIN, SPEC)
    with pytest.raises(ForeignEditError, match="only between surgeon's marks; line 1"):
        ungraft(stray + GRAFTED)


def test_ungraft_of_a_pristine_file_is_refused() -> None:
    """Nothing to take out is said, not passed over."""
    with pytest.raises(DoesNotFitError) as caught:
        ungraft(PLAIN)
    assert caught.value.code == "not-grafted"


@pytest.mark.parametrize(
    "fields",
    [
        {"wants": ("top k",)},
        {"wants": ("top_k", "top_k")},
        {"wants": ("topk_ids",)},
        {"stamp": "a b"},
        {"version": "0.1.0: x"},
        {"patch": ""},
        {"module": "os; x"},
        {"package": "sglang..moe"},
    ],
)
def test_a_spec_that_would_not_make_python_is_refused(fields: dict[str, object]) -> None:
    """Names that cannot be read back or would not compile never reach a file."""
    values: dict[str, object] = {"patch": "oea", "version": "0.1.0", "stamp": "0123", **fields}
    with pytest.raises(UsageError, match="plain names"):
        GraftSpec(**values)  # type: ignore[arg-type]


def test_a_diff_of_a_crlf_file_is_readable() -> None:
    """One kind of line end is not shown; the diff of the same text with LF is the same."""
    crlf = unified_diff(PLAIN.replace(b"\n", b"\r\n"), GRAFTED.replace(b"\n", b"\r\n"), "topk.py")
    assert crlf == unified_diff(PLAIN, GRAFTED, "topk.py")
    assert "\r" not in crlf
    assert crlf.startswith("--- a/topk.py\n+++ b/topk.py\n")


def test_a_diff_shows_line_ends_that_change() -> None:
    """Where only line ends differ, the difference is visible; no change is an empty diff."""
    assert unified_diff(b"x = 1\r\n", b"x = 1\n", "t.py").endswith("-x = 1␍\n+x = 1\n")
    assert unified_diff(b"x = 1\n", b"x = 1", "t.py").endswith("-x = 1\n+x = 1\n\\ No newline at end of file\n")
    assert unified_diff(PLAIN, PLAIN, "t.py") == ""


def test_a_diff_is_decoded_by_the_files_cookie() -> None:
    """Latin-1 text is shown as its author saw it."""
    before = "# coding: latin-1\nx = 'é'\n".encode("latin-1")
    assert "+x = 'è'\n" in unified_diff(before, before.replace(b"\xe9", b"\xe8"), "t.py")
