"""Where the graft goes in, on written modules: what is found, and each reason to refuse."""

from __future__ import annotations

import pytest

from surgeon.errors import DoesNotFitError
from surgeon.surgery import FORWARD, Ambiguous, Found, GraftSpec, NotFound, Unparsable, excerpt, graft, locate

POST = "    topk_ids, topk_weights = _post_process_topk_ids(topk_ids=topk_ids, topk_weights=topk_weights)\n"
RECORD = "    recorder().on_select_experts(topk_ids=topk_ids)\n"
HEAD = "def select_experts(hidden_states, router_logits, top_k):\n    topk_weights, topk_ids = leaf(router_logits)\n"
TAIL = "    return topk_weights, topk_ids\n"
INNER = "".join(f"    {line}\n" for line in (HEAD + RECORD + TAIL).splitlines())
SPEC = GraftSpec("oea", "0.1.0", "0123456789ab", wants=("top_k", "layer_id"))


def _located(text: str) -> object:
    return locate(text.encode())


def test_the_anchor_of_the_later_family_comes_first() -> None:
    """Where both anchors are, ids are still logical only before the post-processing."""
    site = _located(HEAD + POST + RECORD + TAIL)
    assert isinstance(site, Found)
    assert (site.recipe, site.line, site.text) == ("before-post-process", 3, POST.rstrip())
    assert site.bound == {"hidden_states", "router_logits", "top_k", "topk_weights", "topk_ids"}


def test_comments_right_above_the_anchor_stay_with_it() -> None:
    """The graft goes above the comments that belong to the anchor and to the function, and below the blank line."""
    text = "x = 1\n\n# of select_experts\n" + HEAD + "\n    # of the anchor\n    # too\n" + RECORD + TAIL
    site = _located(text)
    assert isinstance(site, Found)
    lines = text.splitlines()
    assert lines[site.line - 1] == RECORD.rstrip()
    assert lines[site.site - 1] == "    # of the anchor"
    assert lines[site.import_site - 1] == "# of select_experts"


def test_no_select_experts_shows_what_is_called_alike() -> None:
    """A renamed function is named in the refusal, with its line."""
    outcome = _located("import os\n" + (HEAD + RECORD + TAIL).replace("select_experts(h", "select_expert(h"))
    assert isinstance(outcome, NotFound)
    assert "no function `select_experts`" in outcome.reason
    assert [line.number for line in outcome.nearest] == [2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@wrapped\n" + HEAD + RECORD + TAIL, "decorated"),
        ("async " + HEAD + RECORD + TAIL, "coroutine"),
        (HEAD + "    yield\n" + RECORD + TAIL, "generator"),
        ("def outer():\n" + INNER, "inside another function or class"),
        ("class Outer:\n" + INNER, "inside another function or class"),
        ("@torch.compile\n" + HEAD + RECORD + TAIL, "is compiled, by `torch.compile`: what is cut into"),
        (
            "@torch.compile(\n    dynamic=True, backend=get_backend()\n)\n" + HEAD + RECORD + TAIL,
            "is compiled, by `torch.compile( dynamic=True, backend=get_backend() )`",
        ),
        (
            HEAD + RECORD + TAIL + "\nif is_cuda:\n    select_experts = torch.compile(select_experts, dynamic=True)\n",
            "is compiled, by `torch.compile(select_experts, dynamic=True)`",
        ),
        ("@torch.compiler.disable\n" + HEAD + RECORD + TAIL, "decorated"),
        ("def select_experts(router_logits): return router_logits\n", "one line"),
        ("from elsewhere import select_experts\n", "from elsewhere"),
        ("if x:\n" + INNER, "another block"),
        (HEAD + "    if top_k:\n    " + RECORD + TAIL, "nested block"),
        (HEAD + "    for _ in x:\n    " + POST + TAIL, "nested block"),
        (HEAD + "    try:\n    " + POST + "    finally:\n        pass\n" + TAIL, "nested block"),
        (HEAD + "    def inner():\n    " + RECORD + "    inner()\n" + TAIL, "nested block"),
        (HEAD + RECORD.rstrip() + "; x = 1\n" + TAIL, "shares its line"),
        (HEAD + "    recorder().on_select_experts(topk_ids=recorder_topk_ids)\n" + TAIL, "but not as"),
        (HEAD + "    out = _post_process_topk_ids(topk_ids=topk_ids)\n" + RECORD + TAIL, "but not as"),
        (HEAD + "    if top_k:\n        return None\n" + RECORD + TAIL, "leaves `select_experts` before the site"),
        (HEAD.replace("topk_weights, topk_ids =", "topk_ids =") + RECORD + TAIL, "`topk_weights` may not be bound"),
        (HEAD.replace("router_logits, top_k", "top_k") + RECORD + TAIL, "`router_logits` may not be bound"),
        (HEAD + "    if top_k:\n        del topk_ids\n" + RECORD + TAIL, "`topk_ids` may not be bound"),
        (HEAD + TAIL, "No recipe fits `select_experts`"),
    ],
)
def test_each_refusal_says_why(text: str, reason: str) -> None:
    """What does not fit is refused with the reason, what was expected, and a line that is really there."""
    outcome = _located(text)
    assert isinstance(outcome, NotFound)
    assert reason in outcome.reason
    assert outcome.expected
    assert outcome.nearest
    for line in outcome.nearest:
        assert text.splitlines()[line.number - 1] == line.text
    with pytest.raises(DoesNotFitError, match="left as it is") as caught:
        graft(text.encode(), SPEC)
    assert outcome.nearest[0].text.strip() in caught.value.message


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (HEAD + RECORD + TAIL + "\n" + HEAD + RECORD + TAIL, [1, 6]),
        (HEAD + RECORD + TAIL + "select_experts = wrapped(select_experts)\n", [1, 5]),
        (HEAD + RECORD + RECORD + TAIL, [3, 4]),
        (HEAD + "    if top_k:\n    " + POST + POST + RECORD + TAIL, [4, 5]),
    ],
)
def test_two_places_are_one_too_many(text: str, lines: list[int]) -> None:
    """Two definitions, a rebinding, or two anchors: each is shown, and none is taken."""
    outcome = _located(text)
    assert isinstance(outcome, Ambiguous)
    assert [line.number for line in outcome.candidates] == lines
    with pytest.raises(DoesNotFitError, match=f"line {lines[1]}"):
        graft(text.encode(), SPEC)


@pytest.mark.parametrize(
    "source",
    [
        b"def select_experts(:\n",
        b"x = '\xff'\n",
        b"# coding: no-such-codec\nx = 1\n",
        b"x = () if 0 else(lambda:())\n",
        b"x = 1\x00\n",
        b"# coding: latin-1\rx = '\xe9'\r",
    ],
)
def test_what_libcst_cannot_read_is_refused(source: bytes) -> None:
    """Broken files, bad bytes, unknown codecs and LibCST's own limits are an answer, not a crash."""
    outcome = locate(source)
    assert isinstance(outcome, Unparsable)
    assert "It does not parse" in outcome.reason
    with pytest.raises(DoesNotFitError) as caught:
        graft(source, SPEC)
    assert caught.value.code == "unparsable"


@pytest.mark.parametrize("source", [b"(" * 5000 + b"1" + b")" * 5000, b"lambda: " * 5000 + b"1", b"1" + b"+1" * 600])
def test_nesting_that_would_overflow_a_parser_is_refused(source: bytes) -> None:
    """LibCST's native parser would end the process on the first two; the tree of the last is too deep to walk."""
    outcome = locate(HEAD.encode() + b"    " + source + b"\n" + (RECORD + TAIL).encode())
    assert isinstance(outcome, Unparsable)
    assert "nested" in outcome.reason


def test_a_syntax_error_is_shown_with_its_line() -> None:
    """The line that stopped the parser is named and quoted."""
    outcome = locate(b"x = 1\r\ny = = 2\r\n")
    assert isinstance(outcome, Unparsable)
    assert (outcome.line, outcome.text) == (2, "y = = 2")


def test_an_excerpt_shows_the_lines_around() -> None:
    """Line numbers and text, cut off at the file's ends, decoded by the file's own cookie."""
    source = "# coding: latin-1\r\nx = 'é'\r\ny = 2\r\nz = 3".encode("latin-1")
    assert excerpt(source, 2, 1) == ((1, "# coding: latin-1"), (2, "x = 'é'"), (3, "y = 2"))
    assert excerpt(source, 4, 1) == ((3, "y = 2"), (4, "z = 3"))


RUNNER = """import torch


# of the class
class ModelRunner:
    forward_pass_id = 0

    def forward(self, forward_batch, skip=False):
        # of the statement
        self.forward_pass_id += 1
        return self.model(forward_batch)
"""


def test_the_forward_pass_begins_below_its_head() -> None:
    """In a method, the graft goes above the first statement with its comments, and the import above the class's."""
    site = locate(RUNNER.encode(), FORWARD)
    assert isinstance(site, Found)
    lines = RUNNER.splitlines()
    assert (site.recipe, site.function) == ("at-entry", "ModelRunner.forward")
    assert lines[site.line - 1] == site.text == "        self.forward_pass_id += 1"
    assert lines[site.site - 1] == "        # of the statement"
    assert lines[site.import_site - 1] == "# of the class"
    assert (site.indent, site.step) == ("        ", "    ")
    assert site.bound == {"self", "forward_batch", "skip"}


def test_the_forward_pass_begins_after_a_docstring() -> None:
    """A docstring stays the first thing in the method; a string further down is not one."""
    head = "        # of the statement\n"
    for text, first in (
        (f'        """Run a pass."""\n{head}', "self.forward"),
        ("        x = 1\n        'no'\n", "x = 1"),
    ):
        site = locate(RUNNER.replace(head, text).encode(), FORWARD)
        assert isinstance(site, Found)
        assert site.text.strip().startswith(first)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RUNNER.replace("ModelRunner", "ModelRunnerBase"), "defines no class `ModelRunner`"),
        (RUNNER.replace("def forward(", "def forward_pass("), "defines no function `forward`"),
        (
            RUNNER.replace("forward_batch,", "batch,"),
            "its first parameters are (self, batch), not (self, forward_batch)",
        ),
        (RUNNER.replace("    def forward", "    @staticmethod\n    def forward"), "`forward` is decorated"),
        (RUNNER.replace("    def forward", "    async def forward"), "coroutine"),
        (RUNNER.replace("class Model", "@wrapped\nclass Model"), "`ModelRunner` is decorated"),
        ("class ModelRunner: pass\n", "one line"),
        (RUNNER.replace("        self.for", "        yield\n        self.for"), "`forward` is a generator"),
        (RUNNER.replace("    def forward", "    @torch.compile\n    def forward"), "`forward` is compiled"),
        (
            RUNNER + "\n\nModelRunner.forward = torch.compile(ModelRunner.forward)\n",
            "`ModelRunner.forward` is compiled, by `torch.compile(ModelRunner.forward)`",
        ),
        ("from elsewhere import ModelRunner\n", "from elsewhere"),
        ("def ModelRunner(): pass\n", "a class at module level is expected"),
    ],
)
def test_each_refusal_of_a_method_says_why(text: str, reason: str) -> None:
    """What does not fit is refused with the reason, what was expected, and a line that is really there."""
    outcome = locate(text.encode(), FORWARD)
    assert isinstance(outcome, NotFound)
    assert reason in outcome.reason
    assert outcome.expected
    for line in outcome.nearest:
        assert text.splitlines()[line.number - 1] == line.text
    with pytest.raises(DoesNotFitError, match="left as it is"):
        graft(text.encode(), GraftSpec("oea", "0.1.0", "0123456789ab", function="announce", place=FORWARD))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (RUNNER + "\n    def forward(self, forward_batch):\n        pass\n", [8, 13]),
        (RUNNER + "\n    forward = wrapped(forward)\n", [8, 13]),
        (RUNNER + "\n\nModelRunner.forward = wrapped(ModelRunner.forward)\n", [8, 14]),
    ],
)
def test_two_methods_are_one_too_many(text: str, lines: list[int]) -> None:
    """A second definition, and a rebinding in the class or from outside: each is shown, and none is taken."""
    outcome = locate(text.encode(), FORWARD)
    assert isinstance(outcome, Ambiguous)
    assert [line.number for line in outcome.candidates] == lines
