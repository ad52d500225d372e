"""Charts as SVG, alone or in a page of HTML: groups of bars, and lines over time. They need no script or network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from foreword.errors import ConfigError, reason_of

WIDTH, LEFT, RIGHT = 860, 70, 20
HEIGHT = 250
"""The size of a panel, in which the plot begins at TOP and ends at BOTTOM."""
TOP, BOTTOM = 52, 210
COLOURS = ("#3366cc", "#dd7722", "#2a9d5c", "#b03a8c", "#7a6a1f", "#5a5a66")
STYLE = """
svg { background: #fff; color: #222; font: 13px system-ui, sans-serif } text { fill: currentColor }
.title { font-weight: 600; font-size: 15px } .small { font-size: 11px } .grid { stroke: currentColor; opacity: .15 }
@media (prefers-color-scheme: dark) { svg { background: #16181d; color: #ddd } }
"""


@dataclass(frozen=True, slots=True)
class Bars:
    """One group of bars per label, with one bar per series: series[name][i] belongs to labels[i]. NaN has no bar."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Lines:
    """One line per series through its points (x, y), x ascending."""

    title: str
    unit: str
    x_unit: str
    series: Mapping[str, Sequence[tuple[float, float]]]


Panel = Bars | Lines


def check_chart_path(path: Path) -> None:
    """Raise ConfigError unless the name ends with .svg or .html."""
    if path.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {str(path)!r:.200}: the name must end with .svg or .html")


def write_chart(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write panels below each other as a picture, or a page with it. Raise ConfigError for a file that cannot be
    written.
    """
    check_chart_path(path)
    picture = svg(title, panels)
    if path.suffix == ".html":
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        style = (
            "body { margin: 0; background: #fff } @media (prefers-color-scheme: dark) { body { background: #16181d } }"
        )
        picture = (
            f"{head}<style>{style} svg {{ display: block; margin: auto; max-width: 100% }}</style>{picture}</html>"
        )
    try:
        path.write_text(picture + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {str(path)!r:.200}: cannot be written ({reason_of(error)})") from None


def svg(title: str, panels: Sequence[Panel]) -> str:
    """Return panels below each other as one SVG element."""
    height = 40 + HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style>',
        _text(LEFT, 24, title, "title"),
    ]
    for number, panel in enumerate(panels):
        body = _bars(panel) if isinstance(panel, Bars) else _lines(panel)
        legend = _legend(panel.series) if len(panel.series) > 1 else []
        head = _text(LEFT, 22, f"{panel.title} ({panel.unit})")
        parts += [f'<g transform="translate(0 {40 + HEIGHT * number})">', head, *legend, *body, "</g>"]
    return "".join([*parts, "</svg>"])


def ticks(most: float, count: int = 4) -> list[float]:
    """Return round numbers from 0 to at least ``most``, with about ``count`` equal distances."""
    if not 0 < most < math.inf:
        return [0.0, 1.0]
    size = 10 ** math.floor(math.log10(most / count))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * count >= most * (1 - 1e-9))
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _bars(panel: Bars) -> list[str]:
    values = [value for row in panel.series.values() for value in row if math.isfinite(value)]
    marks = ticks(max(values, default=0.0))
    parts = _grid(marks)
    room = (WIDTH - LEFT - RIGHT) / max(len(panel.labels), 1)
    width = 0.8 * room / max(len(panel.series), 1)
    for i, label in enumerate(panel.labels):
        start = LEFT + i * room + 0.1 * room
        parts.append(_text(start + 0.4 * room, BOTTOM + 16, label, anchor="middle"))
        for j, (name, row) in enumerate(panel.series.items()):
            if not math.isfinite(row[i]):
                continue
            x, y = start + j * width, _y(row[i], marks)
            said = escape(f"{name}, {label}: {row[i]:.4g} {panel.unit}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 2, 1):.1f}" height="{BOTTOM - y:.1f}" '
                f'fill="{COLOURS[j % len(COLOURS)]}"><title>{said}</title></rect>'
            )
            if width > 26:
                number = f"{row[i]:.3g}" if row[i] < 999.5 else f"{row[i]:,.0f}"
                parts.append(_text(x + width / 2 - 1, y - 4, number, "small", anchor="middle"))
    return parts


def _lines(panel: Lines) -> list[str]:
    points = [point for line in panel.series.values() for point in line]
    marks = ticks(max((y for _, y in points), default=0.0))
    places = ticks(max((x for x, _ in points), default=0.0), 8)
    scale = (WIDTH - LEFT - RIGHT) / places[-1]
    parts = _grid(marks)
    for place in places:
        parts.append(_text(LEFT + scale * place, BOTTOM + 16, f"{place:g}", "small", anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, BOTTOM + 32, panel.x_unit, "small", anchor="end"))
    for j, (name, line) in enumerate(panel.series.items()):
        at = " ".join(f"{LEFT + scale * x:.1f},{_y(y, marks):.1f}" for x, y in line)
        parts.append(
            f'<polyline points="{at}" fill="none" stroke="{COLOURS[j % len(COLOURS)]}" stroke-width="1.6">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return parts


def _grid(marks: Sequence[float]) -> list[str]:
    parts = []
    for mark in marks:
        y = _y(mark, marks)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{mark:g}", "small", anchor="end"))
    return parts


def _legend(names: Iterable[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for j, name in enumerate(names):
        parts.append(f'<rect x="{x:.0f}" y="31" width="10" height="10" fill="{COLOURS[j % len(COLOURS)]}"/>')
        parts.append(_text(x + 14, 40, name, "small"))
        x += 30 + 6.5 * len(name)
    return parts


def _y(value: float, marks: Sequence[float]) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / marks[-1]


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
