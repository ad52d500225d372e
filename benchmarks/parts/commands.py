"""The commands of `python benchmarks`, one per part of Foreword."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from foreword.bench.requests import NAMES
from foreword.cli.options import Json, ModelOptions, Threads, counts, names, not_nan, show, with_engine_options
from foreword.errors import ConfigError
from foreword.scheduler import SchedulerConfig
from foreword.settings import settings_of
from parts import attention as attention_bench
from parts import device as device_bench
from parts import families as families_bench
from parts import gpu as gpu_bench
from parts import kernels as kernels_bench
from parts import memory as memory_bench
from parts import mixed as mixed_bench
from parts import overlap as overlap_bench
from parts import quality as quality_bench
from parts import recording as recording_bench
from parts import sampling as sampling_bench
from parts import speculation as speculation_bench
from parts.attention import KV_FORMATS

app = typer.Typer(
    help="Measure one part of Foreword.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

Turns = Annotated[int, typer.Option(min=1, max=1000, help="Measured runs of each contender, after one to warm up.")]
# Fewer tokens may leave no step that only decodes.
MaxTokens = Annotated[int, typer.Option(min=8, max=512, help="Maximum number of tokens of each answer.")]
MAX_AT_ONCE = 4096
AtOnce = Annotated[str, typer.Option(help="Numbers of concurrent requests, separated by commas.")]


@app.command()
def kernels(
    attention: Annotated[bool, typer.Option("--attention", help="Attention alone.")] = False,
    kv_formats: Annotated[str, typer.Option(help="Of attention: formats of the cache.")] = ",".join(KV_FORMATS),
    rows: Annotated[str, typer.Option(help="Of attention: numbers of requests that decode.")] = "8,64,256",
    contexts: Annotated[str, typer.Option(help="Of attention: tokens before those of the step.")] = "256,1024,8192",
    num_threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure memory bandwidth and arithmetic throughput of this machine, and the fraction that model steps reach."""
    if not attention:
        show(kernels_bench.run(num_threads=num_threads), str, as_json=as_json)
        return
    formats = [one for one in KV_FORMATS if one in kv_formats.split(",")]
    if len(formats) < len(kv_formats.split(",")):
        raise ConfigError(f"--kv-formats {kv_formats!r}: must be of {', '.join(KV_FORMATS)}, each once")
    results = attention_bench.run(
        kv_formats=formats,
        rows=counts("--rows", rows, MAX_AT_ONCE),
        contexts=counts("--contexts", contexts, 1 << 17),
        num_threads=num_threads,
    )
    show(results, str, as_json=as_json)


@app.command()
def sampling(
    model: Annotated[str, typer.Option(help="The model whose step and threads are measured.")] = "smollm2",
    repeats: Turns = 5,
    num_threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time of sampling 256 requests by set of parameters, beside the model's step and PyTorch."""
    show(
        sampling_bench.run(model=model, num_threads=num_threads, repeats=repeats),
        str,
        as_json=as_json,
        header=[f"{'vocab':>8}  {'parameters':<20}{'ms':>9}{'of a step':>11}{'torch ms':>12}"],
    )


@app.command()
def recording(
    model: Annotated[str, typer.Option(help="The model that 64 rows are measured with.")] = "smollm2",
    rows: Annotated[str, typer.Option(help="Numbers of requests around a model that computes nothing.")] = "8,64,256",
    repeats: Turns = 15,
    num_threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure the cost of recording steps: nothing, the last steps in memory, and every step in a file, in turns."""
    results = recording_bench.run(
        model=model, rows=counts("--rows", rows, MAX_AT_ONCE), turns=repeats, num_threads=num_threads
    )
    show(results, str, as_json=as_json)


@app.command()
def quality(
    models: Annotated[list[str] | None, typer.Argument(help="Default: smollm2.", show_default=False)] = None,
    formats: Annotated[str, typer.Option(help="Pairs weight_format/kv_format, separated by commas.")] = ",".join(
        "/".join(pair) for pair in quality_bench.FORMATS
    ),
    num_texts: Annotated[int, typer.Option(min=1, max=1_000_000, help="Parts of the text that are read.")] = 8,
    num_tokens: Annotated[int, typer.Option(min=2, max=1_000_000, help="Tokens of each part.")] = 800,
    text: Annotated[
        Path | None, typer.Option(help="A file; default: documentation of the Python in use.", show_default=False)
    ] = None,
    num_threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure the quality that formats of weights and KV cache cost: perplexity, log-probabilities and best tokens."""
    try:
        given = {} if text is None else {"text": text.read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text}: {error}") from None
    pairs = []
    for name in formats.split(","):
        weight_format, slash, kv_format = name.partition("/")
        if not slash:
            raise ConfigError(f"--formats {name!r}: must be WEIGHTS/CACHE, such as auto/int8")
        pairs.append((weight_format, kv_format))
    show(
        chain.from_iterable(
            quality_bench.run(
                model, formats=pairs, num_texts=num_texts, num_tokens=num_tokens, num_threads=num_threads, **given
            )
            for model in models or ["smollm2"]
        ),
        lambda r: (
            f"{r.model:<20}{r.weight_format + '/' + r.kv_format:<12}{r.perplexity:>11.3f}{100 * r.change:>+9.2f}%"
            f"{100 * r.error:>7.2f}%"
            f"{r.mean_change:>10.4f}{r.largest_change:>9.2f}{100 * r.same_tokens:>12.1f}%"
        ),
        as_json=as_json,
        header=[
            f"{'':32}{'':>11}{'':>10}{'standard':>8}{'change of log p':>19}{'same best':>13}",
            f"{'model':<20}{'formats':<12}{'perplexity':>11}{'change':>10}{'error':>8}{'mean':>10}{'largest':>9}"
            f"{'token':>13}",
        ],
    )


@app.command()
@with_engine_options
def speculation(
    *,
    draft_model: Annotated[str | None, typer.Option(help="A small model with the same vocabulary.")] = None,
    num_tokens: Annotated[int, typer.Option(min=1, max=64, help="Maximum number of drafts per step.")] = 8,
    step_overhead: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, callback=not_nan, help="See SpeculationConfig; default: measured at the start."),
    ] = None,
    adaptive: Annotated[bool, typer.Option(help="Whether drafts with too low an expected gain are omitted.")] = True,
    async_scheduling: Annotated[
        bool, typer.Option("--async-scheduling", help="Plan one step ahead of the model.")
    ] = False,
    kinds: Annotated[
        str, typer.Option(help=f"Of {', '.join(speculation_bench.KINDS)}, separated by commas.", show_default="all")
    ] = ",".join(speculation_bench.KINDS),
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(speculation_bench.METHODS),
    at_once: AtOnce = "1,8",
    max_tokens: MaxTokens = 128,
    repeats: Turns = 3,
    options: ModelOptions,
) -> None:
    """Measure speculative decoding on fixed prompts and W1 to W5, by turns; all methods must give the same tokens."""
    sizes = counts("--at-once", at_once, MAX_AT_ONCE)
    chosen_kinds = names("--kinds", kinds, speculation_bench.KINDS)
    chosen_methods = names("--methods", methods, speculation_bench.METHODS)
    if step_overhead is None:
        step_overhead = speculation_bench.step_overhead(options.model, options=options.settings)
    if options.as_json:
        print(json.dumps({"step_overhead": step_overhead}), flush=True)
    else:
        print(f"fixed cost per step: that of {step_overhead:.1f} tokens")
    show(
        speculation_bench.run(
            options.model,
            num_tokens=num_tokens,
            step_overhead=step_overhead,
            adaptive=adaptive,
            draft_model=draft_model,
            at_once=sizes,
            max_tokens=max_tokens,
            repeats=repeats,
            async_scheduling=async_scheduling,
            options=options.settings,
            kinds=chosen_kinds,
            methods=chosen_methods,
        ),
        lambda r: (
            f"{r.kind:<10}{r.at_once:>8}  {r.method:<12}{r.tok_s:>8.1f}{r.ratio:>8.3f}x"
            f"{f'{r.lowest:.2f} to {r.highest:.2f}':>14}{r.drafts_per_token:>9.2f}{r.acceptance:>9.0%}"
        ),
        as_json=options.as_json,
        header=[
            f"{'prompts':<10}{'at once':>8}  {'method':<12}{'tok/s':>8}{'ratio':>9}{'turns':>14}"
            f"{'drafts':>9}{'right':>9}"
        ],
    )


@app.command()
@with_engine_options
def memory(
    *,
    formats: Annotated[str, typer.Option(help="Pairs weight_format/kv_format, separated by commas.")] = ",".join(
        memory_bench.FORMATS
    ),
    workloads: Annotated[str, typer.Option(help="Names of workloads, separated by commas.")] = "W4",
    options: ModelOptions,
) -> None:
    """Measure the parts of the resident memory of a workload: the program, weights, keys and values, and the rest."""
    show(
        memory_bench.run(
            options.model,
            formats=formats.split(","),
            workloads=names("--workloads", workloads, NAMES),
            options=options.settings,
        ),
        lambda r: (
            f"{r.formats:<12}{r.workload:<4}{r.peak:>8.0f}{r.program:>9.0f}{r.weights:>9.0f}{r.kv:>8.0f}{r.model:>7.0f}"
            f"{r.steps:>7.0f}{r.over:>+23.1%}{r.loading:>9.0f}"
        ),
        as_json=options.as_json,
        header=[
            f"{'10⁶ bytes':<16}{'peak':>8}{'program':>9}{'weights':>9}{'cache':>8}{'model':>7}{'steps':>7}"
            f"{'over weights + cache':>23}{'loading':>9}"
        ],
    )


@app.command()
@with_engine_options
def mixed(
    *,
    shares: Annotated[
        str, typer.Option(help="Values of prompt_time_share, separated by commas; 1: no limit.")
    ] = "1,0.5",
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Requests that run meanwhile.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of each prompt that arrives.")] = 512,
    steps: Annotated[int, typer.Option(min=100, max=10_000, help="Steps per value.")] = 300,
    options: ModelOptions,
) -> None:
    """Time between two tokens of running requests while prompts arrive, by the largest share of prompts in a step."""
    known = settings_of(SchedulerConfig)["prompt_time_share"]
    results = mixed_bench.run(
        options.model,
        shares=[known.read(text) for text in shares.split(",")],
        at_once=at_once,
        prompt_tokens=prompt_tokens,
        steps=steps,
        options=options.settings,
    )
    show(
        results,
        lambda r: (
            f"{r.share:>9}{r.p50_ms:>9.1f}{r.p99_ms:>9.1f}{r.ratio:>8.1f}x{r.first_token_ms:>16.0f}{r.tok_s:>9.0f}"
        ),
        as_json=options.as_json,
        header=[f"{'share':>9}{'p50 ms':>9}{'p99 ms':>9}{'ratio':>9}{'first token, ms':>16}{'tok/s':>9}"],
    )


@app.command()
@with_engine_options
def overlap(
    *, at_once: AtOnce = "1,8,32", max_tokens: MaxTokens = 64, repeats: Turns = 3, options: ModelOptions
) -> None:
    """Compare the asynchronous with the synchronous loop, by turns: the host time between two runs of the model."""
    show(
        overlap_bench.run(
            options.model,
            at_once=counts("--at-once", at_once, MAX_AT_ONCE),
            max_tokens=max_tokens,
            repeats=repeats,
            options=options.settings,
        ),
        lambda r: (
            f"{r.at_once:>7}  {'ngram' if r.speculation else 'off':<12}{'async' if r.async_scheduling else 'sync':<6}"
            f"{r.step_ms:>9.2f}{r.gap_us:>9.0f}{r.tok_s:>8.1f}{r.ratio:>7.2f}x"
        ),
        as_json=options.as_json,
        header=[f"{'at once':>7}  {'speculation':<12}{'loop':<6}{'step ms':>9}{'gap µs':>9}{'tok/s':>8}{'ratio':>8}"],
    )


@app.command()
def device(
    steps: Annotated[int, typer.Option(min=10, max=10_000, help="Steps per workload.")] = 300, as_json: Json = False
) -> None:
    """Measure the host time per step on a device: one packet, one launch, one copy back. Its calls do nothing."""
    show(
        device_bench.run(num_steps=steps),
        lambda r: (
            f"{r.workload:<24}{r.prepare_us:>9.1f}{r.launch_us:>9.1f}{r.result_us:>9.1f}{r.commit_us:>9.1f}"
            f"{r.step_us:>9.1f}{r.packet_bytes:>15.0f}"
        ),
        as_json=as_json,
        header=[
            f"{'median µs':<24}{'prepare':>9}{'launch':>9}{'result':>9}{'commit':>9}{'step':>9}{'packet, bytes':>15}"
        ],
    )


@app.command()
def gpu(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(gpu_bench.SHAPES)}.")] = "llama-3.2-1b",
    rows: AtOnce = "1,8,64,256",
    contexts: Annotated[str, typer.Option(help="Tokens of each prompt, separated by commas.")] = "512,4096",
    steps: Annotated[int, typer.Option(min=8, max=1000, help="Measured steps.")] = 32,
    kv_format: Annotated[str, typer.Option(help="auto or fp8.")] = "auto",
    as_json: Json = False,
) -> None:
    """Decode steps and prompts of executor="device" on this machine's GPU, beside the limits of memory and products."""
    if shape not in gpu_bench.SHAPES:
        raise ConfigError(f"--shape {shape!r}: must be of {', '.join(gpu_bench.SHAPES)}")
    show(
        gpu_bench.run(
            shape, rows=counts("--rows", rows, MAX_AT_ONCE), contexts=counts("--contexts", contexts, 1 << 15),
            steps=steps, kv_format=kv_format,
        ),
        lambda r: (
            f"{r.work:<8}{r.rows:>6}{r.context:>9}{r.step_ms:>11.3f}{r.tok_s:>12.0f}{r.tok_s / r.limit:>10.0%}"
            f"{r.idle:>8.0%}"
        ),
        as_json=as_json,
        header=[f"{shape}, keys and values {kv_format}",
                f"{'work':<8}{'rows':>6}{'context':>9}{'step ms':>11}{'tok/s':>12}{'of limit':>10}{'idle':>8}"],
    )  # fmt: skip


@app.command()
def families(
    only: Annotated[str, typer.Option(help="Names of families, separated by commas.")] = ",".join(
        families_bench.SHAPES
    ),
    formats: Annotated[str, typer.Option(help="Weight formats, separated by commas.")] = ",".join(
        families_bench.FORMATS
    ),
    repeats: Turns = 15,
    num_threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Decode and prefill of a small random model of each family, beside a Llama with as many bytes of weights."""
    for option, given, known in (
        ("--only", only.split(","), list(families_bench.SHAPES)),
        ("--formats", formats.split(","), list(families_bench.FORMATS)),
    ):
        if unknown := set(given) - set(known):
            raise ConfigError(f"{option}: {', '.join(sorted(unknown))}: must be of {', '.join(known)}")
    show(
        families_bench.run(
            only.split(","), [one for one in families_bench.FORMATS if one in formats.split(",")],
            num_threads=num_threads, repeats=repeats,
        ),
        lambda r: (
            f"{r.family:<18}{r.weight_format:<6}{r.work:<10}{r.ms:>9.2f}{r.llama_ms:>10.2f}{r.megabytes:>9.0f}"
            f"{r.tok_s:>10.0f}{r.ratio:>8.0%}"
        ),
        as_json=as_json,
        header=[
            f"{'family':<18}{'format':<6}{'work':<10}{'ms':>9}{'Llama ms':>10}{'MB':>9}{'tok/s':>10}{'ratio':>8}"
        ],
    )  # fmt: skip


@app.command()
def serve(
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, separated by commas.")] = "1,64,256,1000",
    max_tokens: MaxTokens = 64,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Measured requests of each stream.")] = 4,
    model: Annotated[str, typer.Option(help="The model that is served, and whose tokenizer is used.")] = "smollm2",
    as_json: Json = False,
) -> None:
    """Measure the HTTP server around a model that computes nothing, beside the engine alone, and its time to start.

    Rates are those of a model that takes no time. Times are what the server adds to the first token of one that takes
    20 ms per step: of a stream that joins the others while they run, and of the last one if all begin at once.
    """
    try:
        from parts import front
    except ModuleNotFoundError as error:
        raise ConfigError(f"benchmarks serve needs {error.name}: pip install 'foreword[serve]'") from None
    sizes = counts("--streams", streams, MAX_AT_ONCE)
    show([front.ready(model)], lambda r: f"foreword serve {model}: ready after {r.ready_s:.2f} s", as_json=as_json)
    show(
        front.run(streams=sizes, num_tokens=max_tokens, rounds=rounds, model=model),
        lambda r: (
            f"{r.num_streams:>7}{r.requests_s:>12.0f}{r.tok_s:>10.0f}{r.plain_tok_s:>14.0f}"
            f"{r.joining_ms:>12.1f}{r.burst_ms:>11.1f}"
        ),
        as_json=as_json,
        header=[f"{'streams':>7}{'requests/s':>12}{'tok/s':>10}{'without HTTP':>14}{'joining ms':>12}{'burst ms':>11}"],
    )
