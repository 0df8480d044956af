"""The plot: points where the numbers are, in characters and as a picture."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

from surgeon.bench import chart

CURVES = {4: tuple(-0.2 * rows / 64 for rows in range(1, 65)), 5: tuple(0.1 - 0.1 * rows / 64 for rows in range(1, 65))}
SVG = "{http://www.w3.org/2000/svg}"


def test_characters_stand_where_the_numbers_are() -> None:
    """The first column is a batch of 1, the last one of 64; the lowest line is the lowest change."""
    *lines, axis = chart.text(CURVES)
    places = {
        digit: [(line, column) for line, text in enumerate(lines) for column, mark in enumerate(text) if mark == digit]
        for digit in "45"
    }
    drawn = [text.partition("│")[2] for text in lines]
    assert drawn[-1].rstrip().endswith("4")
    assert len(drawn[-1]) == 61
    assert drawn[0].startswith("5")
    assert min(column for _, column in places["4"]) == lines[0].index("│") + 1
    assert lines[0].startswith(" +10 %")
    assert lines[-1].startswith(" -20 %")
    assert [text.partition("│")[0].strip() for text in lines].count("0 %") == 1
    assert axis.split()[:7] == ["1", "2", "4", "8", "16", "32", "64"]


def test_the_picture_is_svg_with_a_line_per_k0() -> None:
    """Well-formed, every batch size a point, ends inside, labels apart, and texts escaped."""
    text = chart.svg(CURVES, title="a < b & c", subtitle="routing step 5 µs", axis="change of step time")
    root = ET.fromstring(text)  # noqa: S314 - our own picture
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == 2
    points = [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in lines]
    assert [len(one) for one in points] == [64, 64]
    assert all(70 <= x <= 690 and 78 <= y <= 378 for one in points for x, y in one)
    # The axis runs from +10 % at the top to -20 % at the bottom.
    assert points[0][-1] == (690.0, 378.0)
    assert points[1][-1] == (690.0, 178.0)
    said = [str(one.text) for one in root.findall(f"{SVG}text")]
    assert {"a < b & c", "routing step 5 µs", "k0 = 4", "k0 = 5", "-20 %", "+0 %", "+10 %", "64"} <= set(said)


def test_labels_of_lines_that_end_together_lie_apart() -> None:
    """Three curves with one end."""
    same = dict.fromkeys((3, 4, 5), (-0.01,) * 64)
    root = ET.fromstring(chart.svg(same, title="", subtitle="", axis=""))  # noqa: S314 - our own picture
    places = [float(one.attrib["y"]) for one in root.findall(f"{SVG}text") if str(one.text).startswith("k0")]
    assert [b - a for a, b in itertools.pairwise(places)] == [15.0, 15.0]


def test_curves_that_are_flat_still_have_an_axis() -> None:
    """Nothing saved, nothing lost, rounding errors included."""
    lines = chart.text({4: (0.0, 1e-17, 0.0)})
    assert sum("4" in line.partition("│")[2] for line in lines) == 1
