"""The page of all causal types of transformers: what tools/transformers_coverage recorded, and the families."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from docpages.marks import with_table
from foreword.models.families import FAMILIES, TEXT_MODELS
from transformers_coverage.not_native import NOT_NATIVE

RECORD = Path(__file__).resolve().parents[2] / "tools" / "transformers_coverage" / "coverage.json"
HEAD = "type", "native", "executor `transformers`", "reason why not with paged attention"
TEXT = """# Causal types of transformers

This table lists every type of causal language models in transformers {version}. It says whether Foreword has its own
implementation ([Models](models.md)), and how the executor `transformers` runs the type ([page](transformers.md)).

- {native} of {all} run natively, {run} on the executor `transformers` ({paged} with paged attention, {own} with a cache
  of their own), {neither} in neither way.
- *Native* says why Foreword has no implementation of its own. The reasons are a table in
  `tools/transformers_coverage/not_native.py`.
- With *own cache*, each request has a cache object of the model's own class, which [differs from paged
  attention](transformers.md#caches-of-models).
- The last column says why paged attention cannot serve the type, and in a row with "no" also why a cache of its own
  cannot.
- Types of encoder–decoders are tried as decoders alone, such as `BartForCausalLM`. [This
  section](transformers.md#encoderdecoders) names those that run as encoder–decoders.
- A reason that begins with "error" is an error of the tiny model that the check makes, not of Foreword.

`make transformers` makes a tiny random model of each type, serves it with chunks, mixed steps, more requests than there
is memory for, and cached prefixes, and compares the log-probability of every token with the model's own eager forward
pass in float32. It fails if a type does not run as this page says, or has neither a native implementation nor a reason.
`python tools/transformers_coverage/check.py --write` and `make pages` write the page.

<!-- types -->
<!-- /types -->
"""


def page() -> str:
    """Return the whole page."""
    record = json.loads(RECORD.read_text())
    types: dict[str, dict[str, str]] = record["types"]
    native, how = types.keys() & {*FAMILIES, *TEXT_MODELS}, Counter(result["runs"] for result in types.values())
    text = TEXT.format(
        version=record["transformers"],
        all=len(types),
        native=len(native),
        run=len(types) - how["no"],
        paged=how["paged attention"],
        own=how["own cache"],
        neither=sum(result["runs"] == "no" and name not in native for name, result in types.items()),
    )
    return with_table(text, "types", HEAD, _rows(types, native))


def _rows(types: dict[str, dict[str, str]], native: set[str]) -> Iterator[tuple[str, ...]]:
    for name, result in sorted(types.items()):
        reason = result["reason"].replace("|", r"\|").rstrip(":")
        yield f"`{name}`", "yes" if name in native else f"no: {NOT_NATIVE[name]}", result["runs"], reason or "–"
