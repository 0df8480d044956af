"""Curves of change over batch size, drawn with characters and as SVG."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TICKS: Final = (1, 2, 4, 8, 16, 32, 64)
_WIDE, _HIGH = 61, 12
_COLOURS: Final = ("#b5179e", "#3a6ea5", "#2a9d5c", "#c77700", "#6c757d", "#111111")


def text(curves: Mapping[int, Sequence[float]]) -> list[str]:
    """Draw curves with characters: each k0 is drawn by its last digit, zero by a line.

    Args:
        curves: per k0 the change (-0.16 is 16 % less) at batch sizes 1, 2, 3, ... in order; the x axis is logarithmic.
    """
    low, high = _range(curves)
    grid = [[" "] * _WIDE for _ in range(_HIGH)]

    def line(value: float) -> int:
        return round((high - value) / (high - low) * (_HIGH - 1))

    grid[line(0.0)] = ["·"] * _WIDE
    for k0, changes in curves.items():
        for column in range(_WIDE):
            rows = len(changes) ** (column / (_WIDE - 1))
            grid[line(_between(changes, rows))][column] = str(k0 % 10)
    shown = {line(value): f"{value * 100:+.0f} %" for value in (low, (low + high) / 2, high)} | {line(0.0): "0 %"}
    drawn = [f"{shown.get(place, ''):>6} │{''.join(cells)}".rstrip() for place, cells in enumerate(grid)]
    axis = [" "] * (_WIDE + 2)
    most = len(next(iter(curves.values())))
    for tick in _TICKS:
        if tick <= most:
            place = round(math.log(tick, most) * (_WIDE - 1))
            axis[place : place + len(str(tick))] = str(tick)
    return [*drawn, " " * 8 + "".join(axis).rstrip() + "   requests in the batch"]


def svg(curves: Mapping[int, Sequence[float]], *, title: str, subtitle: str, axis: str) -> str:
    """Draw curves as an SVG picture of 760 by 440.

    Args:
        curves: as for :func:`text`.
        title: above the picture.
        subtitle: below the title; what the numbers rest on.
        axis: what is on the vertical axis.
    """
    low, high = _range(curves)
    left, top, width, height = 70.0, 78.0, 620.0, 300.0
    most = len(next(iter(curves.values())))

    def x(rows: float) -> float:
        return left + math.log(rows, most) * width

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * height

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 440" font-family="sans-serif" font-size="13">',
        '<rect width="760" height="440" fill="#ffffff"/>',
        f'<text x="{left}" y="30" font-size="17" font-weight="bold">{escape(title)}</text>',
        f'<text x="{left}" y="52" fill="#555555">{escape(subtitle)}</text>',
    ]
    for percent in range(math.ceil(low * 20 - 1e-9) * 5, math.floor(high * 20 + 1e-9) * 5 + 1, 5):
        place = y(percent / 100)
        colour = "#333333" if percent == 0 else "#dddddd"
        parts += [
            f'<line x1="{left}" x2="{left + width}" y1="{place:.1f}" y2="{place:.1f}" stroke="{colour}"/>',
            f'<text x="{left - 8}" y="{place + 4:.1f}" text-anchor="end">{percent:+d} %</text>',
        ]
    for tick in (tick for tick in _TICKS if tick <= most):
        parts.append(f'<text x="{x(tick):.1f}" y="{top + height + 20}" text-anchor="middle">{tick}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 44}" text-anchor="middle">requests in the batch</text>'
    )
    middle = top + height / 2
    parts.append(f'<text transform="rotate(-90 18 {middle})" x="18" y="{middle}" text-anchor="middle">{axis}</text>')
    ends = _apart({k0: y(changes[-1]) for k0, changes in curves.items()})
    for (k0, changes), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
        points = " ".join(f"{x(rows):.1f},{y(change):.1f}" for rows, change in enumerate(changes, start=1))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{left + width + 8}" y="{ends[k0] + 4:.1f}" fill="{colour}">k0 = {k0}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _apart(places: Mapping[int, float]) -> dict[int, float]:
    """Places for labels, from the top, moved down where two would lie over each other."""
    free, moved = -math.inf, {}
    for key, place in sorted(places.items(), key=lambda item: item[1]):
        moved[key] = max(place, free)
        free = moved[key] + 15.0
    return moved


def _range(curves: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """The range of the vertical axis: whole steps of 5 %, zero among them."""
    every = [round(change, 6) for changes in curves.values() for change in changes]
    low, high = min([*every, 0.0]), max([*every, 0.0])
    low, high = math.floor(low * 20) / 20, math.ceil(high * 20) / 20
    return (low, high) if low < high else (low, low + 0.05)


def _between(changes: Sequence[float], rows: float) -> float:
    """The change at a batch size that need not be whole."""
    below = min(int(rows), len(changes))
    above = min(below + 1, len(changes))
    return changes[below - 1] + (rows - below) * (changes[above - 1] - changes[below - 1])
