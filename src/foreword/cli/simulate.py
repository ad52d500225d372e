"""`foreword simulate`: a recorded load through the real scheduler and cache, with a cost model instead of a model."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated

import typer

from foreword.cli.options import BlockSize, Budget
from foreword.scheduler import SchedulerConfig, simulation


def simulate(
    trace: Annotated[Path, typer.Option(help="Arrivals: .csv or .jsonl; see foreword.scheduler.simulation.")],
    requests: Annotated[
        int, typer.Option(min=0, help="Requests to serve, repeating the trace. 0: the trace once.")
    ] = 0,
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = "fcfs,shortest-first",
    speed: Annotated[float, typer.Option(help="Factor on the arrival rate.")] = 1.0,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the KV pool.")] = 8192,
    block_size: BlockSize = 64,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of running requests.")] = 256,
    budget: Budget = 8192,
    max_model_len: Annotated[
        int, typer.Option(help="Maximum number of tokens of a request. 0: the longest of the trace.")
    ] = 0,
    cost_file: Annotated[Path | None, typer.Option("--cost", help="Cost model from `foreword calibrate`.")] = None,
    step_ms: Annotated[float, typer.Option(help="Cost per step, in ms. Ignored with --cost, like the next two.")] = 8.0,
    token_us: Annotated[float, typer.Option(help="Cost per scheduled token, in µs.")] = 40.0,
    context_ns: Annotated[float, typer.Option(help="Cost per context token and step, in ns.")] = 15.0,
    prefix_caching: Annotated[bool, typer.Option(help="Whether requests with equal prefixes share blocks.")] = True,
    plot: Annotated[bool, typer.Option(help="Draw memory use over time (--json: list it).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one policy per line.")] = False,
) -> None:
    """Predict latencies, preemptions, cache hits and memory use of a recorded load, per policy.

    The arrivals pass through the real scheduler and cache; a cost model gives the duration of each step.
    """
    loaded = simulation.read_trace(trace)
    # A simulation makes no cyclic garbage, and each collection would traverse the whole trace.
    gc.disable()
    count = requests or len(loaded.arrivals)
    if cost_file:
        cost = simulation.CostModel.read(cost_file)
    else:
        cost = simulation.CostModel(step_ms / 1e3, token_us / 1e6, context_ns / 1e9)
    if not as_json:
        print(f"{count:,} requests, {num_blocks:,} blocks of {block_size}, {budget:,} tokens per step\n")
        print(f"{'':16}{'first token s':^26}{'between tokens ms':^26}{'':>9}{'hit':>8}{'pre-':>10}{'simulated':>11}")
        print(
            f"{'policy':<16}"
            + f"{'p50':>8}{'p90':>9}{'p99':>9}" * 2
            + f"{'tok/s':>9}{'rate':>8}{'empted':>10}{'s':>11}"
        )
    plots: list[str] = []
    for policy in map(str.strip, policies.split(",")):
        report = simulation.simulate(
            loaded.requests(count, speed=speed),
            max_model_len=max_model_len or loaded.max_length,
            num_blocks=num_blocks,
            block_size=block_size,
            config=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, policy=policy),
            cost=cost,
            prefix_caching=prefix_caching,
        )
        first, between = report.time_to_first_token, report.time_between_tokens
        levels = (50, 90, 99)
        if as_json:
            row = {
                "policy": policy,
                "requests": report.num_requests,
                "steps": report.num_steps,
                "seconds": report.seconds,
                "time_to_first_token_s": {f"p{p}": first.percentile(p) if first.count else None for p in levels},
                "time_between_tokens_s": {f"p{p}": between.percentile(p) if between.count else None for p in levels},
                "tokens_per_second": report.tokens_per_second,
                "hit_rate": report.hit_rate,
                "preemptions": report.num_preemptions,
                "leaked_blocks": report.num_leaked_blocks,
                "peak_memory_use": report.memory_use.peak,
                "memory_use": report.memory_use.points if plot else [],
            }
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{policy:<16}{first.percentile(50):>8.2f}{first.percentile(90):>9.2f}{first.percentile(99):>9.2f}"
            + "".join(f"{1e3 * between.percentile(p):>{8 + (p > 50)}.1f}" for p in levels)
            + f"{report.tokens_per_second:>9.0f}{100 * report.hit_rate:>7.1f}%{report.num_preemptions:>10,}"
            f"{report.seconds:>11,.0f}",
            flush=True,
        )
        use = report.memory_use
        drawing = use.plot(top=use.peak) if use.peak else ""
        plots.append(f"\nblocks in use over time, {policy}; the highest is {100 * use.peak:.1f}% of them\n{drawing}")
    if plot:
        for drawing in plots:
            print(drawing)
