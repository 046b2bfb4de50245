"""Charts as SVG text: lines and dots over numbers, bars over names, and strips over time. Pure; no external assets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 520, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 40, 46
_STRIPS_HEIGHT = 460
_LETTER, _LINE = 6.0, 11.0
"""Approximate letter width and line height."""
_COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0")
_GREY = "#777777"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: its name and points."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False
    """Whether the line is drawn grey and dashed, because it is a bound and not a measurement."""
    labels: Sequence[str] = ()
    """Labels at the points, which are then drawn as dots. Without labels only the line is drawn."""
    is_line: bool = True
    """Whether neighbouring points are connected."""


def lines(title: str, x_title: str, y_title: str, series: Sequence[Series], top: float | None = None) -> str:
    """Return a line chart; both axes begin at zero. `top` is the end of the y axis, by default above all points."""
    right = max((x for each in series for x, _ in each.points), default=0.0) or 1.0
    top = top or 1.08 * max((y for each in series for _, y in each.points), default=0.0) or 1.0
    parts = [*_frame(title, x_title, y_title, top)]
    for value in _ticks(right):
        parts.append(_text(_x(value / right), _HEIGHT - _BOTTOM + 16, _number(value), "middle"))
    colours = iter(_COLOURS)
    for index, each in enumerate(series):
        colour, dash = (_GREY, ' stroke-dasharray="5 4"') if each.is_bound else (next(colours), "")
        places = [(_x(x / right), _y(y / top)) for x, y in each.points]
        if each.is_line:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{points}"/>')
        parts += _dots(places, each.labels, colour) if each.labels else []
        parts += _legend(index, len(series), each.name, colour) if each.name else []
    return _svg(parts)


def bars(title: str, y_title: str, groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return a bar chart: for each group, one bar per series with its value above it."""
    top = 1.18 * max(value for _, values in series for value in values)
    parts = [*_frame(title, "", y_title, top)]
    step = 1 / len(groups)
    width = 0.8 * step / len(series)
    for number, group in enumerate(groups):
        parts.append(_text(_x((number + 0.5) * step), _HEIGHT - _BOTTOM + 16, group, "middle"))
    for index, (name, values) in enumerate(series):
        for number, value in enumerate(values):
            left = _x((number + 0.1) * step + index * width)
            height = _y(0) - _y(value / top)
            box = f'x="{left:.1f}" y="{_y(value / top):.1f}" width="{_x(width) - _x(0) - 2:.1f}" height="{height:.1f}"'
            parts.append(f'<rect {box} fill="{_COLOURS[index]}"/>')
            parts.append(_text(left + (_x(width) - _x(0)) / 2 - 1, _y(value / top) - 4, _number(value), "middle"))
        parts += _legend(index, len(series), name, _COLOURS[index])
    return _svg(parts)


@dataclass(frozen=True, slots=True)
class Segment:
    """One phase of a request, as part of a strip."""

    begin: float
    end: float
    kind: int
    """Index of the segment's name among the chart's kinds."""


def strips(title: str, x_title: str, kinds: Sequence[str], rows: Sequence[Sequence[Segment]]) -> str:
    """Return a Gantt chart: one strip per row, from top to bottom."""
    right = max((each.end for row in rows for each in row), default=0.0) or 1.0
    step = min(14.0, (_STRIPS_HEIGHT - _TOP - _BOTTOM) / max(len(rows), 1))
    height = _TOP + _BOTTOM + step * len(rows)
    parts = [_text(_LEFT, 16, title, "start", ' font-weight="bold"'), _text(_x(0.5), height - 10, x_title, "middle")]
    for value in _ticks(right):
        parts.append(_text(_x(value / right), height - _BOTTOM + 16, _number(value), "middle"))
    for index, row in enumerate(rows):
        y = _TOP + index * step
        for each in row:
            left, width = _x(each.begin / right), max(_x(each.end / right) - _x(each.begin / right), 0.3)
            box = f'x="{left:.1f}" y="{y:.2f}" width="{width:.1f}" height="{0.85 * step:.2f}"'
            parts.append(f'<rect {box} fill="{_COLOURS[each.kind]}"/>')
    for index, kind in enumerate(kinds):
        parts += _legend(index, len(kinds), kind, _COLOURS[index])
    return _svg(parts, height)


def _dots(places: Sequence[tuple[float, float]], labels: Sequence[str], colour: str) -> list[str]:
    """Return dots with their labels. A label that would cover another is omitted."""
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    taken: list[tuple[float, float, float]] = []
    for (x, y), label in zip(places, labels, strict=True):
        width = _LETTER * len(label)
        for text_y, begin in ((y - 4, x + 6), (y - 4, x - 6 - width), (y + 12, x + 6), (y + 12, x - 6 - width)):
            end = begin + width
            is_inside = begin >= _LEFT and end <= _WIDTH - _RIGHT and text_y <= _HEIGHT - _BOTTOM
            is_free = all(
                abs(text_y - other_y) >= _LINE or end <= other or other_end <= begin
                for other, other_end, other_y in taken
            )
            if label and is_inside and is_free:
                taken.append((begin, end, text_y))
                parts.append(_text(begin if begin > x else end, text_y, label, "start" if begin > x else "end"))
                break
    return parts


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _ticks(end: float) -> list[float]:
    """Return round numbers from 0 to the end of an axis, at most six."""
    power = 10 ** math.floor(math.log10(end / 5))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= end / 5 * (1 - 1e-9))
    return [step * number for number in range(int(end / step * (1 + 1e-9)) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'


def _frame(title: str, x_title: str, y_title: str, top: float) -> list[str]:
    parts = [_text(_LEFT, 16, title, "start", ' font-weight="bold"')]
    parts.append(_text(_x(0.5), _HEIGHT - 10, x_title, "middle"))
    middle = _y(0.5)
    parts.append(_text(14, middle, y_title, "middle", f' transform="rotate(-90 14 {middle:.1f})"'))
    for value in _ticks(top):
        y = _y(value / top)
        parts.append(f'<line x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, _number(value), "end"))
    return parts


def _legend(index: int, count: int, name: str, colour: str) -> list[str]:
    x = _x(index / count)
    return [f'<rect x="{x:.1f}" y="25" width="10" height="4" fill="{colour}"/>', _text(x + 14, 31, name, "start")]


def _svg(parts: Sequence[str], height: float = _HEIGHT) -> str:
    style = 'font-family="sans-serif" font-size="11" fill="#333333"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
