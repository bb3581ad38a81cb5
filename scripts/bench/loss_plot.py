"""Curves side by side as an SVG file, without any package."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 340, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 44
COLOURS = ("#1b1b1b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
DASHES = ("7 4", "none", "none", "2 3", "2 3", "2 3")
MOST_POINTS = 400

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes.

    Attributes:
      title: above it.
      lines: name -> (x, y) from left to right.
    """

    title: str
    lines: Mapping[str, Points]


def svg(panels: Sequence[Panel], *, x_label: str, y_label: str) -> str:
    """The text of an SVG file with the panels in a row and one legend."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width, height = WIDTH * max(1, len(panels)), HEIGHT + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * number},0)">']
        parts += _axes(panel, x_label, y_label if number == 0 else "")
        parts += [_curve(panel, name, names.index(name)) for name in panel.lines]
        parts += ["</g>"]
    for number, name in enumerate(names):
        x = LEFT + 120 * number
        parts += [
            f'<line x1="{x}" y1="{HEIGHT + 10}" x2="{x + 28}" y2="{HEIGHT + 10}" '
            f"{_stroke(number)}/>",
            f'<text x="{x + 34}" y="{HEIGHT + 14}">{html.escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two, at most so many."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _ranges(panel: Panel) -> tuple[tuple[float, float], tuple[float, float]]:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = [x for x, _ in points], [y for _, y in points if math.isfinite(y)]
    low, high = min(ys, default=0.0), max(ys, default=1.0)
    margin = 0.04 * (high - low) or 0.5
    return (0.0, max(xs, default=1.0)), (low - margin, high + margin)


def _place(panel: Panel, x: float, y: float) -> tuple[float, float]:
    (x_low, x_high), (y_low, y_high) = _ranges(panel)
    across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
    up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
    return LEFT + across, HEIGHT - BOTTOM - up


def _axes(panel: Panel, x_label: str, y_label: str) -> list[str]:
    x_range, y_range = _ranges(panel)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    middle = f'x="{(LEFT + right) / 2}" text-anchor="middle"'
    parts = [f'<text {middle} y="18">{html.escape(panel.title)}</text>']
    for value in ticks(*x_range):
        x, _ = _place(panel, value, y_range[0])
        parts += [f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>']
    for value in ticks(*y_range):
        _, y = _place(panel, 0, value)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.6g}</text>',
        ]
    parts += [
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#1b1b1b"/>',
        f'<text {middle} y="{bottom + 34}">{html.escape(x_label)}</text>',
    ]
    if y_label:
        turned = f"translate(13,{(TOP + bottom) / 2}) rotate(-90)"
        parts += [f'<text transform="{turned}" text-anchor="middle">{html.escape(y_label)}</text>']
    return parts


def _curve(panel: Panel, name: str, number: int) -> str:
    points = [point for point in panel.lines[name] if math.isfinite(point[1])]
    step = max(1, -(-len(points) // MOST_POINTS))
    shown = [*points[::step], *points[-1:]]
    path = " ".join("{:.1f},{:.1f}".format(*_place(panel, *point)) for point in shown)
    return f'<polyline points="{path}" fill="none" {_stroke(number)}/>'


def _stroke(number: int) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    return f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"'
