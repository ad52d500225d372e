"""`foreword doctor`: report facts about this machine that matter to the engine, problems that slow it down, and their
fixes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from foreword import LLM, SamplingParams
from foreword.cli.options import Json, Threads, warn_of_threads
from foreword.cli.terminal import print_rows
from foreword.insight.machine import Finding, examine, measured, reached
from foreword.insight.report import report
from foreword.machine import default_threads
from foreword.models import registry
from foreword.native import available, native

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 48
COLORS = {"ok": "32", "slow": "33", "missing": "31", "absent": "2"}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements.")] = False,
    num_threads: Threads = None,
    as_json: Json = False,
    as_report: Annotated[
        bool, typer.Option("--report", help="Print what a bug report needs, as JSON, without private data.")
    ] = False,
) -> None:
    """Show what the engine finds on this machine, what slows it down, and the fix.

    Measures memory and arithmetic, and the default model if it is here, in about ten seconds.
    """
    warn_of_threads(num_threads)
    if as_report:
        print(json.dumps(report(_all(quick, num_threads), os.environ), indent=1))
        return
    rows: list[tuple[str, str, str]] = []
    for finding in _all(quick, num_threads):
        if as_json:
            print(json.dumps(asdict(finding)), flush=True)
        fix = f"\n→ {finding.fix}" if finding.fix else ""
        rows.append((finding.verdict, finding.subject, finding.value + fix))
    if not as_json:
        print_rows(rows, COLORS)


def _all(quick: bool, threads: int | None) -> Iterator[Finding]:
    yield from examine()
    if quick or not available():
        return
    model = registry.DEFAULT
    _, rates = native.roofline(threads or default_threads(), megabytes=64)
    yield from measured(rates, model)
    if registry.cached_path(model.name) is not None:
        yield from _speed(rates, model, threads)


def _speed(rates: dict[str, float], model: registry.KnownModel, threads: int | None) -> Iterator[Finding]:
    """Yield the default model's tokens/s for one request, against the limits."""
    prompt = list(range(1000, 1000 + PROMPT_TOKENS))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with LLM(model.name, num_threads=threads, prefix_caching=False, speculation="off") as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1), progress=False)
        metrics = llm.generate(prompt, params, progress=False)[0].metrics
    first, scheduled, finished = metrics.first_token_time, metrics.first_scheduled_time, metrics.finished_time
    assert first is not None
    assert scheduled is not None
    assert finished is not None
    decode, limit = (OUTPUT_TOKENS - 1) / (finished - first), rates["memory_bytes"] / model.size
    prefill = PROMPT_TOKENS / (first - scheduled)
    value = f"{decode:.0f} tokens/s, {prefill:.0f} prompt tokens/s"
    if decode < 0.4 * limit:
        yield Finding(model.name, value, "slow", f"{limit:.0f} tokens/s are possible: stop other programs, or use "
                      "fewer threads than there are idle cores (--num-threads).")  # fmt: skip
    else:
        yield Finding(model.name, value)
    yield from reached(rates, model, decode, prefill)
