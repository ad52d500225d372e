"""The chart of docs/benchmarks.md, drawn from the table of ratios on that page."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
COLOURS = ("#1f4e79", "#2e75b6", "#7fb2e5", "#b5541c", "#e08e45", "#f2c38f")


def ratios(text: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return the names of the workloads, and the ratio of each for every machine."""
    table = text.partition("<!-- ratios -->\n")[2].partition("<!-- /ratios -->")[0]
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return head[1:], {machine: [float(re.split(", ", value)[0]) for value in row] for machine, *row in lines}


def picture() -> str:
    """Return bars as an SVG: one group per workload, one bar per machine, and a line at 1."""
    names, machines = ratios(PAGE.read_text(encoding="utf-8"))
    left, top, bar, scale, gap = 44, 56, 13, 46, 24
    group = bar * len(machines) + gap
    base, width = top + round(4 * scale), left + group * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {base + 26}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>Foreword's speed over that of the best other engine, 8 bit</title>",
        f'<rect width="{width}" height="{base + 26}" fill="#ffffff"/>',
    ]
    for index, machine in enumerate(machines):
        x, y = left + index % 3 * 235, 8 + index // 3 * 20
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}" fill="#1c2733">{escape(machine)}</text>')
    for times in range(5):
        y = base - times * scale
        parts.append(f'<path d="M{left - 6} {y}H{width}" stroke="{"#1c2733" if times == 1 else "#d5dbe3"}"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end" fill="#1c2733">{times} ×</text>')
    for at, name in enumerate(names):
        x = left + gap // 2 + at * group
        for index, row in enumerate(machines.values()):
            height = round(row[at] * scale)
            parts.append(
                f'<rect x="{x + index * bar}" y="{base - height}" width="{bar - 2}" height="{height}" '
                f'fill="{COLOURS[index]}"/>'
            )
        parts.append(f'<text x="{x + bar * len(machines) // 2}" y="{base + 18}" text-anchor="middle">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
