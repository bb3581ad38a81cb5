"""Charts as SVG text, without any package and without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slidedp_jax.run.report_data import Bin

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_OUTLIERS = 0.005
"""Share of the points at either end that do not stretch an axis."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve.

    Attributes:
      name: in the legend.
      bins: its points; where several steps are in one, their range is shaded.
      colour: number of a colour of the page, from 1.
      dashed: whether it is drawn so.
      dots: whether each point is marked.
    """

    name: str
    bins: Sequence[Bin]
    colour: int
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Level:
    """A value that holds for all steps, such as what was planned."""

    name: str
    value: float
    colour: int


def line_chart(
    lines: Sequence[Line],
    *,
    unit: str,
    levels: Sequence[Level] = (),
    marks: Sequence[float] = (),
    from_zero: bool = False,
    most: float = math.inf,
) -> str:
    """Curves over steps; an empty text where there is no point.

    Args:
      lines: those without points are left out.
      unit: of the values.
      levels: horizontal lines.
      marks: steps to mark at the bottom.
      from_zero: whether the axis begins at 0.
      most: where it ends at the latest.
    """
    lines = [line for line in lines if line.bins]
    if not lines:
        return ""
    values = sorted(bin.mean for line in lines for bin in line.bins)
    cut = int(_OUTLIERS * len(values))
    low, high = values[cut], values[-1 - cut]
    low = min([low, *(level.value for level in levels)])
    high = max([high, *(level.value for level in levels)])
    low, high = 0.0 if from_zero else low, min(high, most)
    axes = _Axes(lines, low, high)
    parts = [axes.drawn(unit)]
    for level in levels:
        y = axes.y(level.value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'class="c{level.colour} level"/>'
        )
    for line in lines:
        if any(bin.high > bin.low for bin in line.bins):
            upper = [(axes.x(bin.step), axes.y(bin.high)) for bin in line.bins]
            lower = [(axes.x(bin.step), axes.y(bin.low)) for bin in reversed(line.bins)]
            parts.append(f'<path d="{_path([*upper, *lower])}Z" class="f{line.colour} band"/>')
        points = [(axes.x(bin.step), axes.y(bin.mean)) for bin in line.bins]
        style = f"c{line.colour}{' dashed' if line.dashed else ''}"
        parts.append(f'<path d="{_path(points)}" class="{style} curve"/>')
        if line.dots or len(points) == 1:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="f{line.colour}"/>'
                for x, y in points
            ]
    for step in marks:
        x = axes.x(step)
        parts.append(f'<path d="M{x:.1f} {HEIGHT - _BOTTOM}l-4 7h8Z" class="mark"/>')
    legend = [(line.name, f"b{line.colour}") for line in lines]
    legend += [(level.name, f"b{level.colour} thin") for level in levels]
    return _figure(parts, legend)


def stacked_chart(lines: Sequence[Line], *, unit: str) -> str:
    """Shares from 0 to 1 on top of each other, all over the same steps, in percent."""
    lines = [line for line in lines if line.bins]
    if not lines:
        return ""
    tops = [0.0] * len(lines[0].bins)
    highest = max(sum(line.bins[n].mean for line in lines) for n in range(len(tops)))
    axes = _Axes(lines, 0.0, 100 * max(0.01, min(1.0, highest)))
    parts = []
    for line in lines:
        below = tops
        tops = [low + bin.mean for low, bin in zip(tops, line.bins, strict=True)]
        upper = [
            (axes.x(bin.step), axes.y(100 * top)) for bin, top in zip(line.bins, tops, strict=True)
        ]
        lower = [
            (axes.x(bin.step), axes.y(100 * low)) for bin, low in zip(line.bins, below, strict=True)
        ]
        parts.append(f'<path d="{_path([*upper, *reversed(lower)])}Z" class="f{line.colour}"/>')
    return _figure([*parts, axes.drawn(unit)], [(line.name, f"b{line.colour}") for line in lines])


class _Axes:
    """From steps and values to places."""

    def __init__(self, lines: Sequence[Line], low: float, high: float):
        steps = [bin.step for line in lines for bin in line.bins]
        self._first, self._last = min(steps), max(steps)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        self._low = low if low == 0 else low - margin
        self._high = high + margin

    def x(self, step: float) -> float:
        across = (step - self._first) / ((self._last - self._first) or 1)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        up = (value - self._low) / (self._high - self._low)
        return HEIGHT - _BOTTOM - min(1.0, max(0.0, up)) * (HEIGHT - _TOP - _BOTTOM)

    def drawn(self, unit: str) -> str:
        bottom, parts = HEIGHT - _BOTTOM, []
        for value in ticks(self._low, self._high, 5):
            y = self.y(value)
            parts.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
            )
        parts += [
            f'<text x="{self.x(value):.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{int(value):,}</text>"
            for value in ticks(self._first, self._last, 7)
            if value == int(value)
        ]
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<path d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}" class="axis"/>'
            f'<text transform="translate(13,{middle}) rotate(-90)" text-anchor="middle">'
            f"{html.escape(unit)}</text>"
        )
        return "".join(parts)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two, at most so many and one."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def _number(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:.6g}"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _figure(parts: Sequence[str], legend: Sequence[tuple[str, str]]) -> str:
    names = "".join(
        f'<span><i class="{style}"></i>{html.escape(name)}</span>' for name, style in legend
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
        f'<div class="legend">{names}</div>'
    )
