"""`foreword bench`: measurements, given as ratios within one run where there is a second contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from foreword import LLM
from foreword.bench import engine_host, requests, serving
from foreword.bench import host as host_bench
from foreword.bench import startup as startup_bench
from foreword.charts import Bars, check_chart_path, write_chart
from foreword.cli.app import Command
from foreword.cli.options import Json, ModelOptions, engine_options, grouped, names, show
from foreword.cli.terminal import note
from foreword.energy import EnergyMeter

bench = typer.Typer(
    help="Measure the input layer and the whole engine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

serving_options = grouped(
    options=engine_options(without=("adapter",), has_json=True, defaults={"max_num_seqs": 64, "max_model_len": 4096})
)

Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write charts: .svg or .html.")]
Repeats = Annotated[int, typer.Option(min=1, max=1000, help="Runs per workload; the fastest counts.")]


@bench.command(cls=Command)
def host(
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps per workload.")] = 300,
    engine: Annotated[
        bool, typer.Option("--engine", help="The whole engine, with a model that computes nothing.")
    ] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the host time per step: state changes and tensors, then recording the samples."""
    if plot is not None:
        check_chart_path(plot)
    if engine:
        results = engine_host.run(num_steps=steps)
        shown = show(results, lambda r: f"{r.num_reqs:>6} rows {r.step_us:>9.1f} µs per step", as_json=as_json)
        if plot is not None:
            labels = [f"{r.num_reqs} rows" for r in shown]
            panel = Bars("time of a step of the engine", "µs", labels, {"step": [r.step_us for r in shown]})
            write_chart(plot, "foreword bench host --engine", [panel])
        return
    if as_json:
        _plot_host(plot, show(chain.from_iterable(host_bench.run(num_steps=steps)), str, as_json=True))
        return
    printed: list[host_bench.HostResult] = []
    print(f"{'':24}{'prepare per step, median µs':^42}{'commit, µs':^18}")
    print(f"{'workload':<24}{'native':>9}{'numpy':>9}{'lists':>10}{'lists/native':>14}{'native':>9}{'lists':>9}")
    for native, numpy, lists in host_bench.run(num_steps=steps):
        print(
            f"{native.workload:<24}{native.prepare_us:>9.2f}{numpy.prepare_us:>9.1f}{lists.prepare_us:>10.1f}"
            f"{lists.prepare_us / native.prepare_us:>13.0f}x{native.commit_us:>9.2f}{lists.commit_us:>9.1f}",
            flush=True,
        )
        printed += (native, numpy, lists)
    _plot_host(plot, printed)


def _plot_host(plot: Path | None, results: Sequence[host_bench.HostResult]) -> None:
    if plot is None:
        return
    by_workload: dict[str, list[host_bench.HostResult]] = {}
    for one in results:
        by_workload.setdefault(one.workload, []).append(one)
    panels = [
        Bars(
            f"host time of a step, {name}",
            "µs",
            ["prepare", "commit"],
            {one.engine: [one.prepare_us, one.commit_us] for one in found},
        )
        for name, found in by_workload.items()
    ]
    write_chart(plot, "foreword bench host", panels)


@bench.command(cls=Command)
@serving_options
def throughput(
    *,
    workloads: Annotated[str, typer.Option(help="Names separated by commas.")] = "W2,W3,W4,W5,W7",
    repeats: Repeats = 2,
    plot: Plot = None,
    options: ModelOptions,
) -> None:
    """Measure many concurrent requests: output tokens per second over the whole run, prompts included."""
    chosen = names("--workloads", workloads, requests.NAMES)
    _serve(chosen, repeats, options, lambda r: r.output_tok_s, "output tok/s", plot)


@bench.command(cls=Command)
@serving_options
def latency(*, repeats: Repeats = 3, plot: Plot = None, options: ModelOptions) -> None:
    """Measure one request, 128 tokens in and 128 out: time to the first token, then tokens per second."""
    _serve(["W1"], repeats, options, lambda r: r.decode_tok_s, "decode tok/s", plot)


@bench.command(cls=Command)
@serving_options
def prefill(
    *,
    workloads: Annotated[
        str, typer.Option(help=f"Names separated by commas, among {', '.join(requests.PROMPTS)}.")
    ] = "W6",
    repeats: Repeats = 2,
    plot: Plot = None,
    options: ModelOptions,
) -> None:
    """Measure one long prompt: prompt tokens per second. W6 has 2,048 tokens, W8 8,191 and W9 32,767.

    W8 and W9 need --max-model-len 8192 and 32768.
    """
    chosen = names("--workloads", workloads, requests.PROMPTS)
    _serve(chosen, repeats, options, lambda r: r.prompt_tok_s, "prompt tok/s", plot)


@bench.command(cls=Command)
@grouped(options=engine_options(without=("adapter",), has_json=True))
def startup(*, repeats: Repeats = 3, options: ModelOptions) -> None:
    """Measure a start: the time from the start of a process to its first token, and its peak memory."""
    runs = [startup_bench.run(options.model, options.settings) for _ in range(repeats + 1)][1:]
    show(
        [min(runs, key=lambda r: r.first_token_s)],
        lambda r: (
            f"Python runs after {r.python_s:.2f} s, imported {r.import_s:.2f}, model ready {r.load_s:.2f}, "
            f"first token {r.first_token_s:.2f} s; peak memory {r.peak_mb:.0f} MB"
        ),
        as_json=options.as_json,
    )


def _serve(
    workloads: list[str],
    repeats: int,
    options: ModelOptions,
    rate: Callable[[serving.ServingResult], float],
    unit: str,
    plot: Path | None,
) -> None:
    """Run workloads one after the other and print a table, then a bar chart of one rate; plot: charts in a file."""
    if plot is not None:
        check_chart_path(plot)
    llm = LLM(options.model, **options.settings)
    energy = EnergyMeter()
    if energy.reason and not options.as_json:
        note(f"no joules per token: {energy.reason}")
    results = show(
        (serving.best_of(llm, name, repeats) for name in workloads),
        lambda r: (
            f"{r.workload:<8}{r.output_tok_s:>10.1f}{r.prompt_tok_s:>10.1f}{r.decode_tok_s:>10.1f}"
            f"{r.first_token_ms_p50:>9.1f}{r.first_token_ms_p99:>9.1f}{r.step_ms:>10.2f}{r.seconds:>9.2f}"
            + ("" if r.joules_per_token is None else f"{r.joules_per_token:>9.3f}")
        ),
        as_json=options.as_json,
        header=[
            f"{'':8}{'output':>10}{'prompt':>10}{'decode':>10}{'first token ms':>18}{'step ms':>10}{'wall s':>9}"
            + ("" if energy.reason else f"{'J/token':>9}"),
            f"{'':8}{'tok/s':>10}{'tok/s':>10}{'tok/s':>10}{'p50':>9}{'p99':>9}",
        ],
    )
    if plot is not None:
        labels = [r.workload for r in results]
        first = {"p50": [r.first_token_ms_p50 for r in results], "p99": [r.first_token_ms_p99 for r in results]}
        panels = [
            Bars(unit.partition(" ")[0], "tokens/s", labels, {unit: [rate(r) for r in results]}),
            Bars("first token", "ms", labels, first),
            Bars("step", "ms", labels, {"step": [r.step_ms for r in results]}),
        ]
        write_chart(plot, f"foreword bench: {options.model}", panels)
    if options.as_json:
        return
    most = max(map(rate, results))
    print()
    for result in results:
        print(f"{result.workload:<8}{'█' * max(1, round(40 * rate(result) / most))} {rate(result):,.0f} {unit}")
