"""`foreword simulate`: a recorded load through the real scheduler and cache, with a cost model instead of a model."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import simulation
from foreword.cli.options import TABLE, Group, check_used, grouped, options_of, values_given
from foreword.errors import ConfigError
from foreword.routing import ROUTERS
from foreword.scheduler import SchedulerConfig

DEFAULTS = {"max_num_batched_tokens": 8192, "num_blocks": 8192, "block_size": 64}
"""In place of those of the settings."""

CACHE = {name: TABLE["Engine"][name] for name in ("max_model_len", "num_blocks", "block_size", "prefix_caching")}
CACHE["max_model_len"] = replace(
    CACHE["max_model_len"],
    help="Largest number of tokens of a request, prompt included; None: the longest of the trace.",
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Settings of the scheduler and of the cache of each replica, by name."""

    scheduler: dict[str, Any]
    cache: dict[str, Any]


def _fleet_options(**given: Any) -> FleetOptions:
    values = DEFAULTS | values_given(given)
    cache = {name: values.pop(name) for name in CACHE if name in values}
    return FleetOptions(values, cache)


FLEET = Group(options_of({"Scheduler": TABLE["Scheduler"], "Cache": CACHE}, DEFAULTS), _fleet_options)
LEVELS = (50, 90, 99, 99.9)  # percentiles; the table has the first three


@grouped(fleet=FLEET)
def simulate(
    context: typer.Context,
    trace: Annotated[Path, typer.Option(help="Arrivals: .csv or .jsonl (docs/simulation.md).")],
    requests: Annotated[
        int, typer.Option(min=0, max=10**9, help="Requests to serve, repeating the trace. 0: the trace once.")
    ] = 0,
    policies: Annotated[
        str | None, typer.Option(help="Policies to compare, separated by commas, in place of --policy.")
    ] = None,
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
    cost_file: Annotated[Path | None, typer.Option("--cost", help="Cost model from `foreword calibrate`.")] = None,
    step_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Cost per step, in ms; not with --cost, like the next two.")
    ] = 8.0,
    token_us: Annotated[float, typer.Option(min=0, max=1e9, help="Cost per scheduled token, in µs.")] = 40.0,
    context_ns: Annotated[float, typer.Option(min=0, max=1e9, help="Cost per context token and step, in ns.")] = 15.0,
    plot: Annotated[bool, typer.Option(help="Draw memory use over time (--json: list it).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one policy per line.")] = False,
    *,
    fleet: FleetOptions,
) -> None:
    """Predict latencies, cache hits, preemptions and costs of a recorded load, per policy and router.

    The arrivals pass through a router and each replica's real scheduler and cache; a cost model times each step.
    """
    loaded = simulation.read_trace(trace)
    if cost_file:
        check_used(context, ("step_ms", "token_us", "context_ns"), "with --cost, which has the costs")
        cost = simulation.CostModel.read(cost_file)
    else:
        cost = simulation.CostModel(step_ms / 1e3, token_us / 1e6, context_ns / 1e9)
    if policies is not None and "policy" in fleet.scheduler:
        raise ConfigError("--policy, --policies: give one of them")
    base = SchedulerConfig(**fleet.scheduler)
    schedulers = [base] if policies is None else [replace(base, policy=name.strip()) for name in policies.split(",")]
    fleets = [
        simulation.Fleet(
            config=scheduler,
            cost=cost,
            num_replicas=replicas,
            router=router.strip(),
            **{"max_model_len": loaded.max_length, **fleet.cache},
        )
        for scheduler in schedulers
        for router in routers.split(",")
    ]
    load = loaded.requests(requests or copies * len(loaded.arrivals), speed=speed, copies=copies)
    if not as_json:
        number = f"{replicas:,} replicas of " if replicas > 1 else ""
        blocks = f"{fleets[0].num_blocks:,} blocks of {fleets[0].block_size}"
        print(f"{load.num_requests:,} requests, {number}{blocks}, {base.max_num_batched_tokens:,} tokens per step")
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
