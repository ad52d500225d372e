"""`foreword simulate`: a recorded load through the real scheduler and cache, with a cost model instead of a model."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.options import BlockSize, Budget, MaxNumSeqs
from foreword.scheduler import SchedulerConfig, simulation

LEVELS = (50, 90, 99)  # percentiles shown


def simulate(
    trace: Annotated[Path, typer.Option(help="Arrivals: .csv or .jsonl; see foreword.scheduler.simulation.")],
    requests: Annotated[
        int, typer.Option(min=0, max=10**9, help="Requests to serve, repeating the trace. 0: the trace once.")
    ] = 0,
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = "fcfs,shortest-first",
    speed: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Factor on the arrival rate.")] = 1.0,
    num_blocks: Annotated[int, typer.Option(min=2, max=2**28, help="Blocks of the KV pool.")] = 8192,
    block_size: BlockSize = 64,
    max_num_seqs: MaxNumSeqs = 256,
    budget: Budget = 8192,
    max_model_len: Annotated[
        int, typer.Option(min=0, max=2**24, help="Maximum number of tokens of a request. 0: the longest of the trace.")
    ] = 0,
    cost_file: Annotated[Path | None, typer.Option("--cost", help="Cost model from `foreword calibrate`.")] = None,
    step_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Cost per step, in ms. Ignored with --cost, like the next two.")
    ] = 8.0,
    token_us: Annotated[float, typer.Option(min=0, max=1e9, help="Cost per scheduled token, in µs.")] = 40.0,
    context_ns: Annotated[float, typer.Option(min=0, max=1e9, help="Cost per context token and step, in ns.")] = 15.0,
    prefix_caching: Annotated[bool, typer.Option(help="Whether requests with equal prefixes share blocks.")] = True,
    plot: Annotated[bool, typer.Option(help="Draw memory use over time (--json: list it).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one policy per line.")] = False,
) -> None:
    """Predict latencies, preemptions, cache hits and memory use of a recorded load, per policy.

    The arrivals pass through the real scheduler and cache; a cost model gives the duration of each step.
    """
    configs = [
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, policy=policy.strip())
        for policy in policies.split(",")
    ]
    loaded = simulation.read_trace(trace)
    count = requests or len(loaded.arrivals)
    if cost_file:
        cost = simulation.CostModel.read(cost_file)
    else:
        cost = simulation.CostModel(step_ms / 1e3, token_us / 1e6, context_ns / 1e9)
    if not as_json:
        print(f"{count:,} requests, {num_blocks:,} blocks of {block_size}, {budget:,} tokens per step\n")
        print(f"{'':16}{'first token s':^26}{'between tokens ms':^26}{'':>9}{'hit':>8}{'pre-':>10}{'simulated':>11}")
        percentiles = f"{'p50':>8}{'p90':>9}{'p99':>9}" * 2
        print(f"{'policy':<16}{percentiles}{'tok/s':>9}{'rate':>8}{'empted':>10}{'s':>11}")
    plots: list[str] = []
    gc.freeze()  # a simulation makes no cyclic garbage, and each collection would traverse the whole trace
    try:
        for config in configs:
            report = simulation.simulate(
                loaded.requests(count, speed=speed),
                max_model_len=max_model_len or loaded.max_length,
                num_blocks=num_blocks,
                block_size=block_size,
                config=config,
                cost=cost,
                prefix_caching=prefix_caching,
            )
            print(_json(config.policy, report, plot) if as_json else _line(config.policy, report), flush=True)
            use = report.memory_use
            drawing = use.plot(top=use.peak) if use.peak else ""
            title = f"blocks in use over time, {config.policy}; the highest is {100 * use.peak:.1f}% of them"
            plots.append(f"\n{title}\n{drawing}")
    finally:
        gc.unfreeze()
    if plot and not as_json:
        print(*plots, sep="\n")


def _json(policy: str, report: simulation.SimulationReport, plot: bool) -> str:
    def percentiles(times: simulation.LatencyHistogram) -> dict[str, float | None]:
        return {f"p{p}": times.percentile(p) if times.count else None for p in LEVELS}

    return json.dumps(
        {
            "policy": policy,
            "requests": report.num_requests,
            "steps": report.num_steps,
            "seconds": report.seconds,
            "time_to_first_token_s": percentiles(report.time_to_first_token),
            "time_between_tokens_s": percentiles(report.time_between_tokens),
            "tokens_per_second": report.tokens_per_second,
            "hit_rate": report.hit_rate,
            "preemptions": report.num_preemptions,
            "leaked_blocks": report.num_leaked_blocks,
            "peak_memory_use": report.memory_use.peak,
            "memory_use": report.memory_use.points if plot else [],
        }
    )


def _line(policy: str, report: simulation.SimulationReport) -> str:
    first = [report.time_to_first_token.percentile(p) for p in LEVELS]
    between = [1e3 * report.time_between_tokens.percentile(p) for p in LEVELS]
    return (
        f"{policy:<16}{first[0]:>8.2f}{first[1]:>9.2f}{first[2]:>9.2f}"
        f"{between[0]:>8.1f}{between[1]:>9.1f}{between[2]:>9.1f}"
        f"{report.tokens_per_second:>9.0f}{100 * report.hit_rate:>7.1f}%{report.num_preemptions:>10,}"
        f"{report.seconds:>11,.0f}"
    )
