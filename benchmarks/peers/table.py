"""Print the results of a model as one table: the best result per row and workload."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

COLUMNS = (
    ("W1 decode", "W1", "decode_tok_s"),
    ("W1 prefill", "W1", "prompt_tok_s"),
    ("W2 out", "W2", "output_tok_s"),
    ("W3 out", "W3", "output_tok_s"),
    ("W4 out", "W4", "output_tok_s"),
    ("W5 out", "W5", "output_tok_s"),
    ("W6 prefill", "W6", "prompt_tok_s"),
    ("W8 prefill", "W8", "prompt_tok_s"),
    ("W9 prefill", "W9", "prompt_tok_s"),
    ("W7 s", "W7", "seconds"),
    ("W7 again s", "W7 again", "seconds"),
)


def print_table(results: Path) -> None:
    """Return Markdown: tokens per second (W7: seconds), peak memory after W1 and at the end; then unsupported
    workloads.
    """
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in results.read_text().splitlines():
        result = json.loads(line)
        rows[f"{result['engine']} {result['version']}", result["weights"]].append(result)
    print("| engine | weights |", " | ".join(name for name, _, _ in COLUMNS), "| load s | MB, W1 | MB, all |")
    print("|" + "---|" * (len(COLUMNS) + 5))
    for (engine, weights), measured in sorted(rows.items()):
        cells = [_best(measured, workload, figure) for _, workload, figure in COLUMNS]
        load = min(r["load_s"] for r in measured)
        first = [r["peak_mb"] for r in measured if r["workload"] == "W1"]
        cells += [f"{load:.1f}", f"{min(first):.0f}" if first else "–", f"{max(r['peak_mb'] for r in measured):.0f}"]
        print(f"| {engine} | {weights} | {' | '.join(cells)} |")
    reasons = {(r["engine"], r["workload"], r["skipped"]) for m in rows.values() for r in m if "skipped" in r}
    for engine, workload, reason in sorted(reasons):
        print(f"{engine}, {workload}: {reason}.")


def _best(results: list[dict[str, Any]], workload: str, figure: str) -> str:
    values = [r[figure] for r in results if r["workload"] == workload and figure in r]
    if not values:
        return "–"
    if figure == "seconds":
        return f"{min(values):.2f}"
    return f"{max(values):.4g}"
