"""`foreword simulate`: a recorded load through the real scheduler and cache, with a cost model instead of a model."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foreword import simulation
from foreword.charts import Bars, Lines, Panel, check_chart_path, write_chart
from foreword.cli.options import TABLE, Group, check_used, grouped, options_of, source_of, values_given
from foreword.errors import ConfigError
from foreword.routing import ROUTERS
from foreword.scheduler import SchedulerConfig

Times = simulation.Durations | simulation.LatencyHistogram

DEFAULTS = {"max_num_batched_tokens": 8192, "num_blocks": 8192, "block_size": 64, "prompt_time_share": 1.0}
"""The defaults that replace those of the settings."""

CACHE = {name: TABLE["Engine"][name] for name in ("max_model_len", "num_blocks", "block_size", "prefix_caching")}
CACHE["max_model_len"] = replace(
    CACHE["max_model_len"],
    help="Largest number of tokens of a request, prompt included; None: the longest of the trace.",
)


Given = dict[str, Any]
"""Settings of the scheduler and of the cache of each replica that were given, by name."""


def _fleet_values(**values: Any) -> Given:
    return values_given(values)


FLEET = Group(options_of({"Scheduler": TABLE["Scheduler"], "Cache": CACHE}, DEFAULTS), _fleet_values)
LEVELS = (50, 90, 99, 99.9)  # percentiles; the tables have the first three
SHOWN = LEVELS[:3]
LATENCIES = {
    "time_to_first_token": ("first token", "s", 1),
    "time_per_output_token": ("per output token", "ms", 1e3),
    "time_between_tokens": ("between tokens", "ms", 1e3),
    "end_to_end": ("whole answer", "s", 1),
}
"""Latencies of a report, with what they are called, and the unit that they are printed in."""
LOAD = ("requests", "policies", "replicas", "routers", "processes", "speed", "copies")
"""Options that ask for another load or other replicas than those of a recording."""


@grouped(fleet=FLEET)
def simulate(
    context: typer.Context,
    trace: Annotated[Path | None, typer.Option(help="Arrivals: .csv or .jsonl (docs/simulation.md).")] = None,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A recording of `foreword serve --record`, in place of --trace: its load, the settings of its engine "
            "and costs fitted to its steps. Prints predicted beside measured latencies.",
        ),
    ] = None,
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
    memory: Annotated[
        bool, typer.Option(help="Draw memory use over time (--json: list it). [default: true]", show_default=False)
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write charts of the results: .svg or .html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one policy per line.")] = False,
    *,
    fleet: Given,
) -> None:
    """Predict latencies, cache hits, preemptions and costs of a recorded load, per policy and router.

    The arrivals pass through a router and each replica's real scheduler and cache; a cost model times each step.
    """
    if (trace is None) == (recording is None):
        raise typer.BadParameter("give one of --trace and --from.", param_hint="--trace")
    if plot is not None:
        check_chart_path(plot)
    recorded = None if recording is None else simulation.read_recording(recording)
    if recorded is not None:
        loaded = recorded.trace
        check_used(context, ("step_ms", "token_us", "context_ns"), "with --from, which has the costs")
        cost = recorded.cost if cost_file is None else simulation.CostModel.read(cost_file)
    elif trace is not None:
        loaded = simulation.read_trace(trace)
        if cost_file:
            check_used(context, ("step_ms", "token_us", "context_ns"), "with --cost, which has the costs")
            cost = simulation.CostModel.read(cost_file)
        else:
            cost = simulation.CostModel(step_ms / 1e3, token_us / 1e6, context_ns / 1e9)
    if policies is not None and "policy" in fleet:
        raise ConfigError("--policy, --policies: give one of them")
    if policies is not None and not all(name.strip() for name in policies.split(",")):
        raise ConfigError(
            f"--policies {policies!r:.80}: a name is empty. Separate the names of policies by single commas"
        )
    settings = {**(DEFAULTS if recorded is None else recorded.settings), **fleet}
    names = [settings.get("policy")] if policies is None else [name.strip() for name in policies.split(",")]
    fleets = [
        _fleet(loaded, {**settings, "policy": name or "fcfs"}, cost, num_replicas=replicas, router=router.strip())
        for name in names
        for router in routers.split(",")
    ]
    panels: list[Panel] = []
    if recorded is not None:
        as_it_ran = _fleet(loaded, dict(recorded.settings), cost)
        report = simulation.simulate(loaded.requests(len(loaded.arrivals)), as_it_ran)
        print(_comparison_json(recorded, report) if as_json else _comparison(recorded, report))
        panels += _comparison_panels(recorded.measured, report)
    is_what_if = bool(fleet) or any(source_of(context, name) != "DEFAULT" for name in LOAD)
    if recorded is None or is_what_if:
        load = loaded.requests(requests or copies * len(loaded.arrivals), speed=speed, copies=copies)
        panels += _run(load, fleets, processes, as_json=as_json, memory=memory)
    if plot is not None:
        write_chart(plot, f"foreword simulate: {(recording or trace or plot).name}", panels)


def _fleet(
    loaded: simulation.Trace, settings: dict[str, Any], cost: simulation.CostModel, **others: Any
) -> simulation.Fleet:
    values = {"max_model_len": loaded.max_length, **settings}
    if "num_blocks" not in values:
        raise ConfigError("the recording does not say how many blocks the cache had: give --num-blocks")
    cache = {name: values.pop(name) for name in CACHE if name in values}
    return simulation.Fleet(
        config=SchedulerConfig(**values), cost=cost, hashed_tokens=loaded.hashed_tokens, **cache, **others
    )


def _run(
    load: simulation.Load, fleets: list[simulation.Fleet], processes: int, *, as_json: bool, memory: bool
) -> list[Panel]:
    """Print the outcome of each fleet, and return charts of them."""
    base = fleets[0]
    if not as_json:
        number = f"{base.num_replicas:,} replicas of " if base.num_replicas > 1 else ""
        blocks = f"{base.num_blocks:,} blocks of {base.block_size}"
        print(
            f"{load.num_requests:,} requests, {number}{blocks}, {base.config.max_num_batched_tokens:,} tokens per step"
        )
        heads = "".join(f"{head:^24}" for head in ("first token s", "per output token ms", "whole answer s"))
        print(f"\n{'':26}{heads}{'':>9}{'hit':>7}{'pre-':>9}{'busy':>7}{'h per':>8}")
        percentiles = f"{'p50':>8}{'p90':>8}{'p99':>8}" * 3
        print(f"{'':<26}{percentiles}{'tok/s':>9}{'rate':>7}{'empted':>9}{'':>7}{'M tok':>8}")
    reports: dict[str, simulation.SimulationReport] = {}
    plots: list[str] = []
    gc.disable()  # a simulation makes no cyclic garbage
    try:
        for each in fleets:
            report = reports[_name(each)] = simulation.simulate(load, each, processes=processes)
            print(_json(each, report, memory) if as_json else _line(each, report), flush=True)
            use = report.memory_use
            if each.num_replicas == 1 and use.peak:
                title = (
                    f"blocks in use over time, {each.config.order.name}; the highest is {100 * use.peak:.1f}% of them"
                )
                plots.append(f"\n{title}\n{use.plot(top=use.peak)}")
    finally:
        gc.enable()
    if memory and not as_json and plots:
        print(*plots, sep="\n")
    return _panels(reports)


def _panels(reports: dict[str, simulation.SimulationReport]) -> list[Panel]:
    panels: list[Panel] = [
        _bars(title, unit, {n: _percentiles(getattr(r, name), scale) for n, r in reports.items()})
        for name, (title, unit, scale) in LATENCIES.items()
    ]
    used = {n: [(t, 100 * share) for t, share in r.memory_use.points] for n, r in reports.items() if r.memory_use.peak}
    if used:
        panels.append(Lines("blocks in use", "% of all", "seconds", used))
    return panels


def _bars(title: str, unit: str, series: dict[str, list[float]]) -> Bars:
    return Bars(title, unit, [f"p{level:g}" for level in SHOWN], series)


def _percentiles(times: Times, scale: float) -> list[float]:
    return [scale * times.percentile(level) for level in SHOWN]


def _comparison(recorded: simulation.Recording, report: simulation.SimulationReport) -> str:
    """Return the predicted beside the measured latencies of a recording, with the error of the prediction."""
    cost, measured = recorded.cost, recorded.measured
    lines = [
        f"{len(recorded.trace.arrivals):,} requests; {recorded.num_steps:,} steps cost {1e3 * cost.step:.3g} ms + "
        f"{1e6 * cost.token:.3g} µs per token + {1e9 * cost.context:.3g} ns per token of context, "
        f"{100 * recorded.cost_error:.0f}% from it on average",
        *(f"note: {note}" for note in recorded.notes),
        f"\n{'':24}{'measured':>10}{'predicted':>11}{'error':>9}",
    ]
    for name, (title, unit, scale) in LATENCIES.items():
        found, said = (_percentiles(getattr(side, name), scale) for side in (measured, report))
        for level, one, other in zip(SHOWN, found, said, strict=True):
            label = f"{title} {unit} p{level:g}"
            error = 100 * (other / one - 1) if one else math.nan
            cells = _cell(one, 10, ".4g"), _cell(other, 11, ".4g"), _cell(error, 8, "+.0f", "%")
            lines.append(f"{label:<24}{''.join(cells)}")
    return "\n".join(lines) + "\n"


def _cell(value: float, width: int, form: str, unit: str = "") -> str:
    """Return a number on the right of a column; a dash for one that is not known, such as of no complete request."""
    return "–".rjust(width) + " " * len(unit) if math.isnan(value) else f"{value:{form}}".rjust(width) + unit


def _comparison_json(recorded: simulation.Recording, report: simulation.SimulationReport) -> str:
    found = {"measured": recorded.measured, "predicted": report}
    sides = {side: {f"{n}_s": _by_level(getattr(one, n)) for n in LATENCIES} for side, one in found.items()}
    cost = {**asdict(recorded.cost), "mean_error": recorded.cost_error, "steps": recorded.num_steps}
    return json.dumps({"requests": len(recorded.trace.arrivals), "cost": cost, "notes": list(recorded.notes), **sides})


def _comparison_panels(measured: simulation.Measured, report: simulation.SimulationReport) -> list[Panel]:
    sides = {"measured": measured, "predicted": report}
    return [
        _bars(title, unit, {side: _percentiles(getattr(one, name), scale) for side, one in sides.items()})
        for name, (title, unit, scale) in LATENCIES.items()
    ]


def _by_level(times: Times) -> dict[str, float | None]:
    return {f"p{p:g}": times.percentile(p) if times.count else None for p in LEVELS}


def _name(fleet: simulation.Fleet) -> str:
    policy = fleet.config.order.name
    return policy if fleet.num_replicas == 1 else f"{policy}, {fleet.router}"


def _json(fleet: simulation.Fleet, report: simulation.SimulationReport, memory: bool) -> str:
    return json.dumps(
        {
            "policy": fleet.config.order.name,
            "router": fleet.router,
            "replicas": fleet.num_replicas,
            "requests": report.num_requests,
            "steps": report.num_steps,
            "seconds": report.seconds,
            **{f"{name}_s": _by_level(getattr(report, name)) for name in LATENCIES},
            "tokens_per_second": report.tokens_per_second,
            "hit_rate": report.hit_rate,
            "preemptions": report.num_preemptions,
            "leaked_blocks": report.num_leaked_blocks,
            "busy": report.busy_share,
            "imbalance": report.imbalance,
            "busy_hours_per_million_tokens": report.busy_hours_per_million,
            "peak_memory_use": report.peak_memory_use,
            "memory_use": report.memory_use.points if memory and fleet.num_replicas == 1 else [],
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
        for value in times.percentiles(*SHOWN)
    ]
    return (
        f"{_name(fleet):<26}{''.join(columns)}{report.tokens_per_second:>9.0f}{100 * report.hit_rate:>6.1f}%"
        f"{report.num_preemptions:>9,}{100 * report.busy_share:>6.0f}%{report.busy_hours_per_million:>8.2f}"
    )
