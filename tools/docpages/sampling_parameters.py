"""The page of the sampling parameters."""

from __future__ import annotations

from foreword.batch.values.parameters import Parameter
from foreword.batch.values.sampling_params import PARAMETERS


def page() -> str:
    """Return the page in Markdown."""
    lines = [
        "# Sampling parameters",
        "",
        "Every field of `SamplingParams`, which is also an option of `foreword run` and `foreword chat` and a field of",
        "a request's body, as far as [command line](command-line.md) and [server](server.md) say. Values out of range",
        "are refused. `foreword.sampling.reference` defines the order in which the parameters apply.",
        "",
        "`make pages` writes this page from the table that also checks requests.",
        "",
        "| name | type | default | range | meaning |",
        "|---|---|---|---|---|",
        *map(_line, PARAMETERS),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Parameter) -> str:
    type = (row.type + " | None" * row.optional).replace("|", "\\|")
    return f"| `{row.name}` | `{type}` | `{row.default}` | {row.limits.removeprefix('from ')} | {row.help} |"
