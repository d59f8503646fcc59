"""A line plot as SVG text, by hand: no plotting library is needed for a report."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 930, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 610, 60, 460
_INK, _MUTED, _GRID = "#1f2a37", "#5b6773", "#e3e8ed"
_COLOURS = (
    "#7a8794",
    "#c8553d",
    "#9dc3e6",
    "#57a773",
    "#1f7a4d",
    "#0b3d91",
    "#b07aa1",
    "#e0a100",
    "#6b4c9a",
    "#444444",
)
_STEPS = (1, 2, 2.5, 5, 10)


class Line(NamedTuple):
    """A named line through points, in the order of their x."""

    name: str
    points: list[tuple[float, float]]


def ticks(high: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to at least `high`."""
    if high <= 0:
        return [0.0, 1.0]
    rough = high / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * s for s in _STEPS if scale * s >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def plot(
    lines: Sequence[Line], *, title: str, x_label: str, y_label: str, diagonal: str | None = None
) -> str:
    """Both axes begin at 0; ``diagonal`` names the line y = x, which is drawn dashed."""
    x_ticks = ticks(max(x for line in lines for x, _ in line.points))
    y_ticks = ticks(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / x_ticks[-1] * (_RIGHT - _LEFT),
            _BOTTOM - y / y_ticks[-1] * (_BOTTOM - _TOP),
        )

    parts = [_text(_LEFT, 30, title, size=16, weight=700)]
    for x in x_ticks:
        at, _ = place(x, 0)
        parts.append(_path([(at, _TOP), (at, _BOTTOM)], _GRID, 1))
        parts.append(_text(at, _BOTTOM + 18, f"{x:g}", anchor="middle", fill=_MUTED))
    for y in y_ticks:
        _, at = place(0, y)
        parts.append(_path([(_LEFT, at), (_RIGHT, at)], _GRID, 1))
        parts.append(_text(_LEFT - 8, at + 4, f"{y:g}", anchor="end", fill=_MUTED))
    middle = (_LEFT + _RIGHT) / 2
    parts.append(_text(middle, _BOTTOM + 42, x_label, anchor="middle"))
    parts.append(_text(_LEFT, _TOP - 10, y_label))
    if diagonal is not None:
        end = min(x_ticks[-1], y_ticks[-1])
        parts.append(_path([place(0, 0), place(end, end)], _MUTED, 1.5, dash="6 5"))
    entries = [] if diagonal is None else [(diagonal, _MUTED, "6 5")]
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        entries.append((line.name, colour, ""))
        points = [place(x, y) for x, y in line.points]
        parts.append(_path(points, colour, 2.5))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    for i, (name, colour, dash) in enumerate(entries):
        at = _TOP + 10 + 22 * i
        parts.append(_path([(_RIGHT + 20, at), (_RIGHT + 46, at)], colour, 2.5, dash=dash))
        parts.append(_text(_RIGHT + 54, at + 4, name))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    background = f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    anchor: str = "start",
    fill: str = _INK,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def _path(
    points: Sequence[tuple[float, float]], colour: str, width: float, *, dash: str = ""
) -> str:
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    more = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{more}/>'
