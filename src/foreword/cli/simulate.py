"""`foreword simulate`: a recorded load through the real scheduler and cache, with a clock instead of a model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

ROWS = (
    ("requests", "{:,}"),
    ("output tokens/s", "{:,.0f}"),
    ("time to first token p50", "{:.3f} s"),
    ("time to first token p99", "{:.3f} s"),
    ("time between tokens p50", "{:.4f} s"),
    ("time between tokens p99", "{:.4f} s"),
    ("preemptions", "{:,}"),
    ("prefix hit rate", "{:.1%}"),
    ("memory use", "{}"),
)


def simulate(
    trace: Annotated[str, typer.Argument(help="A .csv or .jsonl trace; see docs.")],
    requests: Annotated[int, typer.Option(help="How many; the trace is repeated as needed.")] = 1000,
    policy: Annotated[list[str] | None, typer.Option(help="fcfs, priority, shortest-first; may be repeated.")] = None,
    kv_tokens: Annotated[int, typer.Option(help="Tokens that the KV pool holds.")] = 1_000_000,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block; default: what one hash id of the trace stands for, else 64.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 8192,
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast as recorded.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one policy a line.")] = False,
) -> None:
    """Latencies, preemptions, hit rate and memory of a load, for one or several policies."""
    from foreword.scheduler import SchedulerConfig
    from foreword.scheduler.simulation import read_trace
    from foreword.scheduler.simulation import simulate as run
    from foreword.scheduler.simulation.trace import HASHED_TOKENS

    recorded = read_trace(trace)
    block_size = block_size or (HASHED_TOKENS if recorded.has_prefixes else 64)
    results: dict[str, dict[str, Any]] = {}
    for name in policy or ["fcfs"]:
        report = run(
            recorded.requests(requests, speed=speed),
            max_model_len=recorded.max_length + 1,
            num_blocks=kv_tokens // block_size + 1,
            block_size=block_size,
            config=SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, policy=name
            ),
            prefix_caching=recorded.has_prefixes,
        )
        first, between = report.time_to_first_token, report.time_between_tokens
        values = (
            report.num_requests,
            report.tokens_per_second,
            first.percentile(50),
            first.percentile(99),
            between.percentile(50),
            between.percentile(99),
            report.num_preemptions,
            report.hit_rate,
            report.memory_use.plot(30),
        )
        results[name] = dict(zip((row for row, _ in ROWS), values, strict=True))
        if as_json:
            print(json.dumps({"policy": name, **results[name], "memory use": report.memory_use.points}))
    if not as_json:
        _table(results)


def _table(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", *results)
    for name, shown in ROWS:
        table.add_row(name, *(shown.format(result[name]) for result in results.values()))
    Console().print(table)
