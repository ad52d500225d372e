"""The chart of docs/benchmarks.md, drawn from the runs in benchmarks/results."""

from __future__ import annotations

from html import escape

from benchmark_results import read
from docpages.benchmarks import FIGURES, ratios

COLOURS = ("#1f4e79", "#2e75b6", "#7fb2e5", "#b5541c", "#e08e45", "#f2c38f", "#6b7b8c", "#a9b5c0")
SHOWN = [name for name in FIGURES if name != "W7"]  # which compares engines that share a prefix with one that does not


def picture() -> str:
    """Return bars as an SVG: one group per workload, one bar per machine, and a line at 1."""
    shown = [list(FIGURES).index(name) for name in SHOWN]
    machines = {machine: [row[at] or 0.0 for at in shown] for machine, row in ratios(read(), "8-bit").items()}
    left, top, bar, scale, gap = 44, 56, 13, 46, 24
    group = bar * len(machines) + gap
    base, width = top + round(4 * scale), left + group * len(SHOWN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {base + 26}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>Foreword's speed divided by that of the best other engine, 8 bit</title>",
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
    for at, name in enumerate(SHOWN):
        x = left + gap // 2 + at * group
        for index, row in enumerate(machines.values()):
            height = round(row[at] * scale)
            parts.append(
                f'<rect x="{x + index * bar}" y="{base - height}" width="{bar - 2}" height="{height}" '
                f'fill="{COLOURS[index]}"/>'
            )
        parts.append(f'<text x="{x + bar * len(machines) // 2}" y="{base + 18}" text-anchor="middle">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])
