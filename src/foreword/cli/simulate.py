"""`foreword simulate`: a recorded load through the real scheduler and cache, with a cost model instead of a model."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated

import typer

from foreword import simulation
from foreword.cli.options import BlockSize, Budget, MaxNumSeqs
from foreword.routing import ROUTERS
from foreword.scheduler import SchedulerConfig

LEVELS = (50, 90, 99, 99.9)  # percentiles; the table has the first three


def simulate(
    trace: Annotated[Path, typer.Option(help="Arrivals: .csv or .jsonl; see foreword.simulation.")],
    requests: Annotated[
        int, typer.Option(min=0, max=10**9, help="Requests to serve, repeating the trace. 0: the trace once.")
    ] = 0,
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = "fcfs",
    replicas: Annotated[int, typer.Option(min=1, max=simulation.MAX_REPLICAS, help="Replicas of the model.")] = 1,
    routers: Annotated[
        str, typer.Option("--router", help=f"Routers to compare, separated by commas: {', '.join(ROUTERS)}.")
    ] = "prefix",
    processes: Annotated[
        int, typer.Option(min=1, max=simulation.MAX_PROCESSES, help="Processes that share the replicas.")
    ] = 1,
    speed: Annotated[float, typer.Option(min=1e-6, max=1e6, help="Factor on the arrival rate.")] = 1.0,
    copies: Annotated[
        int, typer.Option(min=1, max=simulation.MAX_COPIES, help="Copies of the trace that run at the same time.")
    ] = 1,
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
    """Predict latencies, cache hits, preemptions and costs of a recorded load, per policy and router.

    The arrivals pass through a router and the real scheduler and cache of each replica; a cost model gives the
    duration of each step.
    """
    loaded = simulation.read_trace(trace)
    if cost_file:
        cost = simulation.CostModel.read(cost_file)
    else:
        cost = simulation.CostModel(step_ms / 1e3, token_us / 1e6, context_ns / 1e9)
    fleets = [
        simulation.Fleet(
            max_model_len=max_model_len or loaded.max_length,
            num_blocks=num_blocks,
            block_size=block_size,
            config=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, policy=policy.strip()),
            cost=cost,
            prefix_caching=prefix_caching,
            num_replicas=replicas,
            router=router.strip(),
        )
        for policy in policies.split(",")
        for router in routers.split(",")
    ]
    load = loaded.requests(requests or copies * len(loaded.arrivals), speed=speed, copies=copies)
    if not as_json:
        fleet = f"{replicas:,} replicas of " if replicas > 1 else ""
        print(
            f"{load.num_requests:,} requests, {fleet}{num_blocks:,} blocks of {block_size}, {budget:,} tokens per step"
        )
        heads = "".join(f"{head:^24}" for head in ("first token s", "per output token ms", "whole answer s"))
        print(f"\n{'':26}{heads}{'':>9}{'hit':>7}{'pre-':>9}{'busy':>7}{'h per':>8}")
        percentiles = f"{'p50':>8}{'p90':>8}{'p99':>8}" * 3
        print(f"{'':<26}{percentiles}{'tok/s':>9}{'rate':>7}{'empted':>9}{'':>7}{'M tok':>8}")
    plots: list[str] = []
    gc.disable()  # a simulation makes no cyclic garbage
    try:
        for each in fleets:
            report = simulation.simulate(load, each, processes=processes)
            print(_json(each, report, plot) if as_json else _line(each, report), flush=True)
            use = report.memory_use
            if replicas == 1 and use.peak:
                title = f"blocks in use over time, {each.config.policy}; the highest is {100 * use.peak:.1f}% of them"
                plots.append(f"\n{title}\n{use.plot(top=use.peak)}")
    finally:
        gc.enable()
    if plot and not as_json and plots:
        print(*plots, sep="\n")


def _json(fleet: simulation.Fleet, report: simulation.SimulationReport, plot: bool) -> str:
    def percentiles(times: simulation.Durations | simulation.LatencyHistogram) -> dict[str, float | None]:
        return {f"p{p:g}": times.percentile(p) if times.count else None for p in LEVELS}

    return json.dumps(
        {
            "policy": fleet.config.policy,
            "router": fleet.router,
            "replicas": fleet.num_replicas,
            "requests": report.num_requests,
            "steps": report.num_steps,
            "seconds": report.seconds,
            "time_to_first_token_s": percentiles(report.time_to_first_token),
            "time_per_output_token_s": percentiles(report.time_per_output_token),
            "time_between_tokens_s": percentiles(report.time_between_tokens),
            "end_to_end_s": percentiles(report.end_to_end),
            "tokens_per_second": report.tokens_per_second,
            "hit_rate": report.hit_rate,
            "preemptions": report.num_preemptions,
            "leaked_blocks": report.num_leaked_blocks,
            "busy": report.busy_share,
            "imbalance": report.imbalance,
            "busy_hours_per_million_tokens": report.busy_hours_per_million,
            "peak_memory_use": report.peak_memory_use,
            "memory_use": report.memory_use.points if plot and fleet.num_replicas == 1 else [],
        }
    )


def _line(fleet: simulation.Fleet, report: simulation.SimulationReport) -> str:
    columns = [
        f"{scale * value:>8.{digits}f}"
        for times, scale, digits in (
            (report.time_to_first_token, 1, 2),
            (report.time_per_output_token, 1e3, 1),
            (report.end_to_end, 1, 2),
        )
        for value in times.percentiles(*LEVELS[:3])
    ]
    name = fleet.config.policy if fleet.num_replicas == 1 else f"{fleet.config.policy}, {fleet.router}"
    return (
        f"{name:<26}{''.join(columns)}{report.tokens_per_second:>9.0f}{100 * report.hit_rate:>6.1f}%"
        f"{report.num_preemptions:>9,}{100 * report.busy_share:>6.0f}%{report.busy_hours_per_million:>8.2f}"
    )
