"""Recordings, written by torch.save and read without torch; and what is told from them."""

from __future__ import annotations

import io
import math
import pickle
import random
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from surgeon.bench import active, recording, torch_file
from surgeon.errors import DoesNotFitError, UsageError
from tests.support import recordings

if TYPE_CHECKING:
    from pathlib import Path

# Two routed layers of five experts behind a dense one, top-2: a prefill pass of 6 rows, decode passes of 2, 2 and 1.
PREFILL = ((0, 0, 0, 0, 0), (3, 3, 2, 2, 2), (6, 6, 0, 0, 0))
PAIR = ((0, 0, 0, 0, 0), (2, 1, 1, 0, 0), (2, 2, 0, 0, 0))
OTHER = ((0, 0, 0, 0, 0), (1, 1, 1, 1, 0), (2, 1, 0, 1, 0))
ALONE = ((0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (1, 1, 0, 0, 0))
PASSES = (PREFILL, PAIR, OTHER, ALONE)
ROWS = (6, 2, 2, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same passes in each of the recorder's forms."""
    folder = tmp_path_factory.mktemp("recordings")
    recordings.write(folder, PASSES, rows=ROWS, modes=(1, 2, 2, 2), ranks=3)
    return folder


def passes(files: Path, mode: str) -> tuple[recording.Pass, ...]:
    """What is read from one form."""
    return recording.read(mode, (files / f"{mode}.pt").read_bytes(), top_k=2)


@pytest.mark.parametrize("mode", ["per_pass", "per_token", "stat"])
def test_every_form_gives_the_same_passes(files: Path, mode: str) -> None:
    """Rows, layers that routed, and counts; `stat` sums over ranks, and has empty steps in its buffer."""
    found = passes(files, mode)
    assert [one.rows for one in found] == list(ROWS)
    assert {one.layers for one in found} == {(1, 2)}
    assert [one.counts for one in found] == [layers[1:] for layers in PASSES]
    assert [one.active for one in found] == [(5, 2), (3, 2), (4, 3), (2, 2)]


def test_the_form_per_token_says_which_passes_decode(files: Path) -> None:
    """Others are told by their rows."""
    assert [one.phase for one in passes(files, "per_token")] == ["other", "decode", "decode", "decode"]
    assert len(recording.decoding(passes(files, "per_token"))) == 3
    assert len(recording.decoding(passes(files, "per_pass"))) == 4
    assert len(recording.decoding(passes(files, "per_pass"), max_rows=5)) == 3


def test_a_summary_is_what_can_be_counted_by_hand(files: Path) -> None:
    """T by batch size, shares, and the most used expert."""
    found = recording.summarize(passes(files, "per_token"), experts=5, top_k=2)
    assert (found.passes, found.tokens, found.usual) == (3, 5, 2)
    alone, pair = found.sizes
    assert (alone.rows, alone.passes, alone.active) == (1, 1, 2)
    assert (pair.rows, pair.passes, pair.active) == (2, 2, (3 + 2 + 4 + 3) / 4)
    assert pair.uniform == pytest.approx(5 * (1 - 0.6**2))
    assert found.shares.layers[0] == pytest.approx((4 / 5, 2 / 5, 2 / 5, 1 / 5, 1 / 5))
    first = (1 - 0.2**2) + 2 * (1 - 0.6**2) + 2 * (1 - 0.8**2)
    second = (1 - 0.0**2) + (1 - 0.2**2) + (1 - 0.8**2)
    assert pair.independent == pytest.approx((first + second) / 2)
    use = found.layers[1]
    assert (use.layer, use.active, use.busiest, use.unused) == (2, 2.5, 0.5, 2)


def test_even_choices_are_spread_as_over_all_experts() -> None:
    """The number that the entropy of the choices stands for."""
    even = recording.Pass(1, 0, 4, (0,), ((1, 1, 1, 1, 1, 1, 1, 1),))
    found = recording.summarize([even], experts=8, top_k=2)
    assert found.layers[0].effective == pytest.approx(8)
    assert found.sizes[0].independent == pytest.approx(active.uniform(8, 2, 4))


def test_predicted_t_goes_through_what_was_recorded(files: Path) -> None:
    """At a recorded batch size the unchanged model has the recorded T; fewer kept experts have less, one row has k."""
    found = recording.summarize(passes(files, "per_token"), experts=5, top_k=2)
    assert found.active(2, 2) == pytest.approx(3.0)
    assert found.active(1, 2) == pytest.approx(2.0)
    assert 1.0 <= found.active(2, 1) < found.active(2, 2) < found.active(8, 2) <= 5.0


@pytest.mark.parametrize(
    ("skew", "likeness"),
    [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 1.5)],
    ids=["uniform", "skewed", "alike", "both"],
)
def test_t_under_k0_is_told_from_counts_that_do_not_hold_it(skew: float, likeness: float) -> None:
    """Batches of 16 rows in which experts are liked unequally and rows resemble each other, routed for real by k0.

    A recording has the native counts alone; T of the rows' k0 best is told from them within 8 %, where the uniform
    formula is off by up to a half.
    """
    numbers = random.Random(5)  # noqa: S311 - experts, not secrets
    liking = [-skew * math.log(1 + place) for place in range(128)]
    numbers.shuffle(liking)
    passes, truth = [], {3: 0, 5: 0}
    for number in range(120):
        topic = [one + numbers.gauss(0, likeness) for one in liking]
        counts, unions = [0] * 128, {k0: set[int]() for k0 in truth}
        for _ in range(16):
            keys = [one - math.log(numbers.expovariate(1.0)) for one in topic]
            order = sorted(range(128), key=keys.__getitem__, reverse=True)
            for expert in order[:8]:
                counts[expert] += 1
            for k0, union in unions.items():
                union.update(order[:k0])
        for k0, union in unions.items():
            truth[k0] += len(union)
        passes.append(recording.Pass(number, 0, 16, (0,), (tuple(counts),)))
    found = recording.summarize(passes, experts=128, top_k=8)
    for k0, total in truth.items():
        assert found.active(16, k0) == pytest.approx(total / 120, rel=0.08)


def test_a_recording_without_decode_is_refused(files: Path) -> None:
    """With what it holds instead."""
    only = passes(files, "per_token")[:1]
    with pytest.raises(DoesNotFitError, match="found rows: 6") as refused:
        recording.summarize(only, experts=5, top_k=2)
    assert refused.value.code == "no-decode"


def test_a_recording_of_another_model_is_refused(files: Path) -> None:
    """The number of experts tells."""
    with pytest.raises(DoesNotFitError, match="has 5 experts per layer; the model has 64"):
        recording.summarize(passes(files, "per_pass"), experts=64, top_k=2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("module.pt", r"it names torch\.nn\.modules\.linear\.Linear"),
        ("weights.pt", r"it holds \['weights'\]; expected records or logical_count"),
        ("view.pt", "expected contiguous ones"),
    ],
)
def test_another_file_of_torchs_is_refused_with_the_reason(files: Path, name: str, reason: str) -> None:
    """A model, other tensors, and a view that no recorder writes."""
    with pytest.raises(UsageError, match=reason) as refused:
        recording.read(name, (files / name).read_bytes(), top_k=2)
    assert (refused.value.code, refused.value.where) == ("bad-recording", name)


def archive(pickled: bytes, **members: bytes) -> bytes:
    """A zip archive as torch.save lays it out."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("x/data.pkl", pickled)
        for name, content in members.items():
            file.writestr(f"x/{name}", content)
    return data.getvalue()


class Harmful:
    """Runs a function when it is unpickled by who does not look."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle writes: a call."""
        return self.call


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    """A pickle that would write a file when loaded is refused before it does."""
    import os

    witness = tmp_path / "written"
    pickled = pickle.dumps({"records": Harmful(os.mkdir, str(witness))}, protocol=2)
    pickle.loads(pickled)  # noqa: S301 - the witness works: pickle itself does run it
    assert witness.is_dir()
    witness.rmdir()
    with pytest.raises(torch_file.BadFileError, match=r"it names (posix|nt)\.mkdir"):
        torch_file.load(archive(pickled))
    assert not witness.exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no zip archive"),
        (b"\x80\x02}q\x00.", "no zip archive"),
        (archive(b"\x80\x02}q\x00"), "its pickle is broken"),
        (archive(pickle.dumps([1], protocol=2), byteorder=b"big"), "in the order b'big'"),
    ],
    ids=["empty", "pickle", "cut", "big-endian"],
)
def test_a_file_that_is_none_is_refused(data: bytes, reason: str) -> None:
    """Whatever its bytes are, the error is ours."""
    with pytest.raises(torch_file.BadFileError, match=reason):
        torch_file.load(data)


def test_an_archive_of_something_else_is_refused() -> None:
    """As is one that is compressed."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    with pytest.raises(torch_file.BadFileError, match=r"no data\.pkl"):
        torch_file.load(data.getvalue())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", pickle.dumps([1] * 1000, protocol=2))
    with pytest.raises(torch_file.BadFileError, match="compressed"):
        torch_file.load(packed.getvalue())


def test_a_file_that_was_cut_short_is_refused(files: Path) -> None:
    """As when a copy was interrupted, or the bytes of a tensor are not all there."""
    whole = (files / "per_pass.pt").read_bytes()
    with pytest.raises(UsageError, match="cannot be read as a recording"):
        recording.read("cut.pt", whole[: len(whole) // 2], top_k=2)
    shorter = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(shorter, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name)[:4] if "/data/" in name else old.read(name))
    with pytest.raises(UsageError, match=r"has 4 bytes; expected"):
        recording.read("short.pt", shorter.getvalue(), top_k=2)
