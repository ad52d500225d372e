"""`foreword bench`: figures, as ratios in one run where there is something to compare with."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.options import EngineOptions, Json, Model, Threads, counts, show, with_engine_options
from foreword.errors import ConfigError

if TYPE_CHECKING:
    from foreword.bench.serving import ServingResult

bench = typer.Typer(help="Measure the input layer, the kernels and the whole engine.", no_args_is_help=True)

Repeats = Annotated[int, typer.Option(help="Runs of each workload, of which the fastest counts.")]
AtOnce = Annotated[str, typer.Option(help="Numbers of requests at once, separated by commas.")]


@bench.command()
def host(
    steps: Annotated[int, typer.Option(help="Steps of each workload.")] = 300,
    engine: Annotated[bool, typer.Option("--engine", help="The whole engine, with a model that does nothing.")] = False,
    as_json: Json = False,
) -> None:
    """The host's cost of a step: state changes and tensors, and recording the samples."""
    if engine:
        from foreword.bench import engine_host

        show(
            engine_host.run(num_steps=steps),
            lambda r: f"{r.num_reqs:>6} rows {r.step_us:>9.1f} µs a step",
            as_json=as_json,
        )
        return
    from foreword.bench import host as measure

    if as_json:
        show(chain.from_iterable(measure.run(num_steps=steps)), str, as_json=True)
        return
    print(f"{'':24}{'prepare a step, median µs':^42}{'commit, µs':^18}")
    print(f"{'workload':<24}{'native':>9}{'numpy':>9}{'lists':>10}{'lists/native':>14}{'native':>9}{'lists':>9}")
    for native, numpy, lists in measure.run(num_steps=steps):
        print(
            f"{native.workload:<24}{native.prepare_us:>9.2f}{numpy.prepare_us:>9.1f}{lists.prepare_us:>10.1f}"
            f"{lists.prepare_us / native.prepare_us:>13.0f}x{native.commit_us:>9.2f}{lists.commit_us:>9.1f}",
            flush=True,
        )


@bench.command()
@with_engine_options
def throughput(
    *,
    model: Model = "smollm2",
    workloads: Annotated[str, typer.Option(help="Which, separated by commas.")] = "W2,W3,W4,W5,W7",
    repeats: Repeats = 2,
    options: EngineOptions,
    as_json: Json = False,
) -> None:
    """Many requests at once: output tokens a second over the whole run, prompts included."""
    results = _serve(model, workloads, repeats, options, as_json=as_json)
    _plot({r.workload: r.output_tok_s for r in results}, "output tok/s", as_json=as_json)


@bench.command()
@with_engine_options
def latency(*, model: Model = "smollm2", repeats: Repeats = 3, options: EngineOptions, as_json: Json = False) -> None:
    """One request, 128 tokens in and 128 out: time to the first token, and tokens a second after it."""
    results = _serve(model, "W1", repeats, options, as_json=as_json)
    _plot({r.workload: r.decode_tok_s for r in results}, "decode tok/s", as_json=as_json)


@bench.command()
@with_engine_options
def prefill(*, model: Model = "smollm2", repeats: Repeats = 2, options: EngineOptions, as_json: Json = False) -> None:
    """One prompt of 2,048 tokens: prompt tokens a second."""
    results = _serve(model, "W6", repeats, options, as_json=as_json)
    _plot({r.workload: r.prompt_tok_s for r in results}, "prompt tok/s", as_json=as_json)


@bench.command()
@with_engine_options
def startup(*, model: Model = "smollm2", repeats: Repeats = 3, options: EngineOptions, as_json: Json = False) -> None:
    """From the start of a process to its first token, with a warm file cache, and the memory it took."""
    from foreword.bench import startup as measure

    runs = [measure.run(model, options) for _ in range(repeats + 1)][1:]
    show(
        [min(runs, key=lambda r: r.first_token_s)],
        lambda r: (
            f"Python runs after {r.python_s:.2f} s, imported {r.import_s:.2f}, model ready {r.load_s:.2f}, "
            f"first token {r.first_token_s:.2f} s; peak memory {r.peak_mb:.0f} MB"
        ),
        as_json=as_json,
    )


@bench.command()
@with_engine_options
def speculation(
    *,
    model: Model = "smollm2",
    draft_model: Annotated[str | None, typer.Option(help="A small model with the same vocabulary.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Most drafts in a step.")] = 4,
    step_overhead: Annotated[float | None, typer.Option(help="See SpeculationConfig; default: measured now.")] = None,
    adaptive: Annotated[bool, typer.Option(help="Whether drafts that are not worth it are left out.")] = True,
    async_scheduling: Annotated[bool, typer.Option("--async-scheduling", help="Plan a step ahead.")] = False,
    at_once: AtOnce = "1,8",
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 128,
    repeats: Annotated[int, typer.Option(help="Turns after the one that warms up; the median counts.")] = 3,
    options: EngineOptions,
    as_json: Json = False,
) -> None:
    """Speculative decoding on fixed prompts, the methods in turns; their outputs are checked to be equal."""
    from foreword.bench import speculation as measure

    sizes = counts("--at-once", at_once)
    if step_overhead is None:
        step_overhead = measure.step_overhead(model, options=options)
    if as_json:
        print(json.dumps({"step_overhead": step_overhead}), flush=True)
    else:
        print(f"a step costs {step_overhead:.1f} tokens besides its own")
    show(
        measure.run(
            model,
            num_tokens=num_tokens,
            step_overhead=step_overhead,
            adaptive=adaptive,
            draft_model=draft_model,
            at_once=sizes,
            max_tokens=max_tokens,
            repeats=repeats,
            async_scheduling=async_scheduling,
            options=options,
        ),
        lambda r: (
            f"{r.kind:<10}{r.at_once:>8}  {r.method:<12}{r.tok_s:>8.1f}{r.ratio:>7.2f}x"
            f"{r.drafts_per_token:>9.2f}{r.acceptance:>9.0%}"
        ),
        as_json=as_json,
        header=[f"{'prompts':<10}{'at once':>8}  {'method':<12}{'tok/s':>8}{'ratio':>8}{'drafts':>9}{'accepted':>10}"],
    )


@bench.command()
@with_engine_options
def overlap(
    *,
    model: Model = "smollm2",
    at_once: AtOnce = "1,8,32",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    repeats: Annotated[int, typer.Option(help="Turns after the one that warms up.")] = 3,
    options: EngineOptions,
    as_json: Json = False,
) -> None:
    """The asynchronous loop against the synchronous one: what lies between two runs of the model, in turns."""
    from foreword.bench import overlap as measure

    show(
        measure.run(
            model, at_once=counts("--at-once", at_once), max_tokens=max_tokens, repeats=repeats, options=options
        ),
        lambda r: (
            f"{r.at_once:>7}  {'ngram' if r.speculation else 'off':<12}{'async' if r.async_scheduling else 'sync':<6}"
            f"{r.step_ms:>9.2f}{r.gap_us:>9.0f}{r.tok_s:>8.1f}{r.ratio:>7.2f}x"
        ),
        as_json=as_json,
        header=[f"{'at once':>7}  {'speculation':<12}{'loop':<6}{'step ms':>9}{'gap µs':>9}{'tok/s':>8}{'ratio':>8}"],
    )


@bench.command()
def kernels(num_threads: Threads = None, as_json: Json = False) -> None:
    """What this machine's memory and arithmetic can do, and the fraction of it that each kernel reaches."""
    from foreword.bench import kernels as measure

    show(measure.run(num_threads=num_threads), str, as_json=as_json)


def _serve(model: str, workloads: str, repeats: int, options: EngineOptions, *, as_json: bool) -> list[ServingResult]:
    from foreword import LLM
    from foreword.bench import requests, serving

    names = workloads.split(",")
    for name in names:
        if name not in requests.NAMES:
            raise ConfigError(f"--workloads {name!r}: must be of {', '.join(requests.NAMES)}")
    llm = LLM(model, max_num_seqs=64, max_model_len=4096, **options)
    return show(
        (serving.best_of(llm, name, repeats) for name in names),
        lambda r: (
            f"{r.workload:<8}{r.output_tok_s:>10.1f}{r.prompt_tok_s:>10.1f}{r.decode_tok_s:>10.1f}"
            f"{r.first_token_ms_p50:>9.1f}{r.first_token_ms_p99:>9.1f}{r.step_ms:>10.2f}{r.seconds:>9.2f}"
        ),
        as_json=as_json,
        header=[
            f"{'':8}{'output':>10}{'prompt':>10}{'decode':>10}{'first token ms':>18}{'step ms':>10}{'wall s':>9}",
            f"{'':8}{'tok/s':>10}{'tok/s':>10}{'tok/s':>10}{'p50':>9}{'p99':>9}",
        ],
    )


def _plot(bars: dict[str, float], unit: str, *, as_json: bool) -> None:
    """Bars of text, the longest as wide as half a terminal."""
    if as_json:
        return
    most = max(bars.values())
    print()
    for label, value in bars.items():
        print(f"{label:<8}{'█' * max(1, round(40 * value / most))} {value:,.0f} {unit}")
