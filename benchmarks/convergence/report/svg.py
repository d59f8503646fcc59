"""Plots as SVG text, drawn by hand: lines over a plane, and dots with whiskers in rows."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e8ec"
COLOURS = ("#3d6fb4", "#c8553d", "#2f9c95", "#f0a202", "#8a4fae", "#57a773", "#66727f", "#b4527f")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Series:
    """A named line; ``low`` and ``high`` give a whisker to each point."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = True


class Axis:
    """A scale from values to pixels."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], *, log: bool) -> None:
        self.log = log
        low, high = min(values), max(values)
        if log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            self.low, self.high = low, high
        room = (self.high - self.low) * 0.05 or abs(self.high) * 0.05 or 1.0
        self.low, self.high = self.low - room, self.high + room
        self.start, self.end = pixels

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside."""
        if self.log:
            exponents = range(math.floor(self.low) - 1, math.ceil(self.high) + 1)
            steps = (1,) if self.high - self.low > 2.5 else (1, 2, 5)
            candidates = [m * 10.0**e for e in exponents for m in steps]
            return [v for v in candidates if self.low <= math.log10(v) <= self.high]
        rough = (self.high - self.low) / 8
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first = math.ceil(self.low / step)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step) + 1)]


class Drawing:
    """SVG elements in the order in which they are painted."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="{_FONT}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        ]

    def text(self, x, y, words, *, size=12, fill=INK, anchor="start", weight=400, turn=None):
        more = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}" font-weight="{weight}"{more}>{escape(words)}</text>'
        )

    def line(self, points, stroke, *, width=1.0, dashed=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{more}/>'
        )

    def dot(self, x, y, fill, *, radius=3.0):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def number(value: float) -> str:
    """A tick's label."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:g}"


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    width: float = 760,
    height: float = 360,
) -> str:
    """Lines over a plane, named at the right."""
    names = max((len(s.name) for s in series), default=0)
    left, right, top, bottom = 66, width - 30 - 6.6 * names, 40, height - 46
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    x_axis = Axis(xs, (left, right), log=log_x)
    y_axis = Axis(ys, (bottom, top), log=log_y)
    draw = Drawing(width, height, title)
    draw.text(left, 22, title, size=14, weight=700)
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        draw.line([(left, y), (right, y)], GRID)
        draw.text(left - 8, y + 4, number(tick), size=11, fill=MUTED, anchor="end")
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        draw.line([(x, bottom), (x, bottom + 4)], MUTED)
        draw.text(x, bottom + 18, number(tick), size=11, fill=MUTED, anchor="middle")
    draw.line([(left, bottom), (right, bottom)], MUTED)
    draw.text((left + right) / 2, height - 8, x_label, fill=MUTED, anchor="middle")
    draw.text(16, (top + bottom) / 2, y_label, fill=MUTED, anchor="middle", turn=-90)
    places = _spread([y_axis.at(s.points[-1][1]) for s in series], 15)
    for i, s in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        points = [(x_axis.at(x), y_axis.at(y)) for x, y in s.points]
        draw.line(points, colour, width=1.8, dashed=s.dashed)
        for x, y in points if s.dots else ():
            draw.dot(x, y, colour)
        draw.text(right + 10, places[i] + 4, s.name, fill=colour)
    return draw.svg()


@dataclass(frozen=True)
class Row:
    """A named dot with a whisker on both sides; ``heading`` opens a group instead."""

    name: str
    value: float = 0.0
    whisker: float = 0.0
    heading: bool = False


def dots(title: str, rows: Sequence[Row], *, x_label: str, width: float = 760) -> str:
    """Dots with whiskers, one row each, over a common axis with a line at zero."""
    pitch, top = 21, 38
    left, right, bottom = (
        14 + 6.4 * max(len(r.name) for r in rows),
        width - 24,
        top + pitch * len(rows),
    )
    plain = [r for r in rows if not r.heading]
    values = [0.0, *(r.value + s * r.whisker for r in plain for s in (-1, 1))]
    axis = Axis(values, (left, right), log=False)
    draw = Drawing(width, bottom + 44, title)
    draw.text(14, 22, title, size=14, weight=700)
    for tick in axis.ticks():
        x = axis.at(tick)
        draw.line([(x, top), (x, bottom)], GRID)
        draw.text(x, bottom + 16, number(tick), size=11, fill=MUTED, anchor="middle")
    draw.line([(axis.at(0), top), (axis.at(0), bottom)], INK)
    draw.text((left + right) / 2, bottom + 36, x_label, fill=MUTED, anchor="middle")
    for i, row in enumerate(rows):
        y = top + pitch * i + pitch / 2
        draw.text(14, y + 4, row.name, weight=700 if row.heading else 400)
        if not row.heading:
            ends = [axis.at(row.value + s * row.whisker) for s in (-1, 1)]
            draw.line([(x, y) for x in ends], COLOURS[0], width=1.6)
            draw.dot(axis.at(row.value), y, COLOURS[0], radius=3.6)
    return draw.svg()


def _spread(places: list[float], pitch: float) -> list[float]:
    """Move labels apart so that none hides another, keeping their order."""
    order = sorted(range(len(places)), key=places.__getitem__)
    result = list(places)
    for before, i in itertools.pairwise(order):
        result[i] = max(result[i], result[before] + pitch)
    return result
