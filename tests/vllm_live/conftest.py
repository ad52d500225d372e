"""The variables that Triton's interpreter needs before Triton is imported, and the table of what was checked."""

import os
import sys

from checking import LIVE

if directory := os.environ.get("TRITON_DIRECTORY"):
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(directory)

ROW = "{:32} {:>7} {:>11} {:>9} {:>12} {:>8.0f}"


def pytest_terminal_summary(terminalreporter):
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    rows = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == LIVE
    ]
    if not rows:
        return
    terminalreporter.section("live steps of vLLM, checked")
    heads = ROW.replace(".0f", "").format("scenario", "steps", "compared", "findings", "preemptions", "seconds")
    sums = ("together", *(sum(row[i] for row in rows) for i in range(1, 6)))
    for line in (heads, *(ROW.format(*row) for row in (*rows, sums))):
        terminalreporter.write_line(line)
