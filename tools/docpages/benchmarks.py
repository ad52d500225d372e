"""The tables of docs/benchmarks.md, made from the runs in benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark_results import Run, newest, read
from docpages.marks import with_table, with_text
from foreword.bench.requests import PROMPTS

FIGURES = {"W1": "decode_tok_s"} | dict.fromkeys(("W2", "W3", "W4", "W5"), "output_tok_s")
FIGURES |= {"W6": "prompt_tok_s", "W7": "seconds", "W7 again": "seconds"}
"""Workload → its figure in a result: tokens per second, or seconds."""
_LONG = dict.fromkeys(PROMPTS, "prompt_tok_s")
"""The workloads of the table of long prompts, with their figure."""
NONE = "–"
NO_FASTER = 1.05  # ratios below are within the noise, or worse


@dataclass(frozen=True, slots=True)
class Comparison:
    """Weights that are compared: Foreword's, of which the first that a run has count, and those of other engines.

    theirs: None for any.
    """

    title: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...] | None


COMPARISONS = {
    "8-bit": Comparison("8 bit", ("int8/int8/preallocated", "int8/int8"), ("int8", "w8a8", "q8_0")),
    "bf16": Comparison("bf16", ("bf16/bf16/preallocated", "bf16"), ("bf16",)),
    "default": Comparison("the default weights", ("auto",), None),
}


def figure(results: Sequence[dict[str, Any]], workload: str) -> float | None:
    """Return the best figure of a workload; None if it was not measured."""
    key = (FIGURES | _LONG)[workload]
    values = [row[key] for row in results if row["workload"] == workload and key in row]
    return (min if key == "seconds" else max)(values) if values else None


def compared(run: Run, comparison: Comparison, workload: str) -> tuple[float | None, float | None]:
    """Return Foreword's figure of a workload, and the best one of all other engines."""
    ours: list[dict[str, Any]] = []
    for weights in comparison.ours:
        ours = ours or [row for row in run.results if row["engine"] == "foreword" and row["weights"] == weights]
    theirs = [
        row
        for row in run.results
        if not row["engine"].startswith("foreword") and (not comparison.theirs or row["weights"] in comparison.theirs)
    ]
    return figure(ours, workload), figure(theirs, workload)


def ratio(run: Run, comparison: Comparison, workload: str) -> float | None:
    """Return how many times as fast as the best other engine Foreword is; None if one of them was not measured."""
    ours, theirs = compared(run, comparison, workload)
    if ours is None or theirs is None:
        return None
    return theirs / ours if FIGURES[workload] == "seconds" else ours / theirs


def ratios(runs: Sequence[Run], name: str) -> dict[str, list[float | None]]:
    """Return the ratios of each workload by machine, for machines that have any."""
    found = {run.machine: [ratio(run, COMPARISONS[name], w) for w in FIGURES] for run in newest(runs, "engines")}
    return {machine: row for machine, row in found.items() if any(one is not None for one in row)}


def page(text: str) -> str:
    """Return the page with its tables."""
    runs = read()
    text = with_text(text, "faster", _faster(runs))
    text = with_text(text, "not faster", _not_faster(runs))
    for name, comparison in COMPARISONS.items():
        head = (comparison.title, *FIGURES)
        found = ratios(runs, name)
        cells = [(machine, *map(_ratio, row)) for machine, row in found.items()]
        text = with_table(text, f"ratios {name}", head, cells)
        figures = [
            (run.machine, *(_pair(*compared(run, comparison, workload)) for workload in FIGURES))
            for run in newest(runs, "engines")
            if run.machine in found
        ]
        text = with_table(text, f"figures {name}", head, figures)
    text = with_text(text, "families formats", _family_formats(newest(runs, "families")[-1]))
    for name, (head, rows) in _tables(runs).items():
        text = with_table(text, name, head, rows)
    return with_table(text, "runs", ("question", "machine", "date", "commit", "command", "note"), _origins(runs))


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def _pair(ours: float | None, theirs: float | None) -> str:
    return NONE if ours is None else f"{_number(ours)} / {_number(theirs)}"


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    least, most = f"{min(known):.1f}", f"{max(known):.1f}"
    return least if least == most else f"{least} to {most}"


def _faster(runs: Sequence[Run]) -> str:
    lines = [
        "- **What is faster.** The figures are Foreword's speed, divided by that of the fastest other engine with",
        "  weights of the same width:",
    ]
    for name in ("8-bit", "bf16"):
        found = list(ratios(runs, name).values())
        several, prompt = [one for row in found for one in row[:5]], [row[5] for row in found]
        lines.append(
            f"  - {name} weights: {_range(several)} times (W1 to W5), and {_range(prompt)} times for a long prompt (W6)"
        )
    host = [vllm / ours for run in newest(runs, "host") for vllm, ours in map(_host, run.results)]
    lines.append(f"  - preparing a step: {min(host):.0f} to {max(host):.0f} times as fast as vLLM")
    return "\n".join(lines)


def _not_faster(runs: Sequence[Run]) -> str:
    lines = []
    for name, comparison in COMPARISONS.items():
        slow = []
        for machine, row in ratios(runs, name).items():
            found = {w: one for w, one in zip(FIGURES, row, strict=True) if one is not None and one < NO_FASTER}
            if found:
                slow.append(f"{machine} ({', '.join(found)}: {_range(list(found.values()))})")
        if slow:
            against = "weights of any width" if comparison.theirs is None else "the same width"
            lines.append(f"  - {comparison.title} against {against}: {'; '.join(slow)}")
    return "\n".join(lines) or "  - none"


def _host(result: dict[str, Any]) -> tuple[float, float]:
    """Return µs of vLLM and of Foreword from the same scheduler output."""
    costs = {cost["engine"]: cost["prepare_us"] for cost in result["costs"]}
    return costs["vllm"], costs["foreword apply"]


def _tables(runs: Sequence[Run]) -> dict[str, tuple[Sequence[str], list[Sequence[str]]]]:
    """Return the head and the rows of each other table by its name."""
    host, loop, startup = newest(runs, "host"), newest(runs, "loop"), newest(runs, "startup")
    return {
        "load": (
            ("machine", "engine", "weights", "load, s", "memory in W1, MB"),
            [
                (run.machine, row["engine"], row["weights"], _number(row["load_s"]), _number(row["peak_mb"]))
                for run in newest(runs, "engines")
                for row in run.results
                if row["workload"] == "W1" and "peak_mb" in row and "load_s" in row
            ],
        ),
        **{
            name: (
                ("machine", "model", "engine", "weights", *figures, "memory, MB"),
                [row for run in newest(runs, name.replace(" ", "-")) for row in _by_model(run, figures)],
            )
            for name, figures in (("long prompts", _LONG), ("larger model", FIGURES), ("hybrid", FIGURES))
        },
        "host": (
            ("machine", *(result["workload"] for result in host[0].results)),
            [(run.machine, *(_pair(*reversed(_host(result))) for result in run.results)) for run in host],
        ),
        "loop": (
            ("machine", *(f"R = {result['num_reqs']}" for result in loop[0].results)),
            [(run.machine, *(_number(result["step_us"]) for result in run.results)) for run in loop],
        ),
        "front ends": (
            ("machine", "front end", "streams", "requests/s, 1 token", "tokens/s, 64 tokens"),
            [
                (run.machine, *(_text(row[name]) for name in ("front_end", "streams", "requests_s", "tok_s")))
                for run in newest(runs, "front-ends")
                for row in run.results
            ],
        ),
        "speculation": (
            ("machine", "prompts", "method", "tokens/s", "ratio", "drafts accepted"),
            [
                (run.machine, row["kind"], row["method"], _number(row.get("tok_s")), _ratio(row["ratio"]),
                 f"{row['acceptance']:.0%}")
                for run in newest(runs, "speculation")
                for row in run.results
                if row.get("method", "off") != "off"
            ],
        ),
        "quality": _quality(newest(runs, "quality")[-1]),
        **{
            name: _families(newest(runs, question)[-1])
            for name, question in (("families", "families"), ("families llama.cpp", "families-llama-cpp"))
        },
        "startup": (
            ("machine", "first token, s", "peak memory, MB"),
            [
                (run.machine, _spread([row["first_token_s"] for row in run.results]),
                 _number(min((row["peak_mb"] for row in run.results if "peak_mb" in row), default=None)))
                for run in startup
            ],
        ),
        "embeddings": (
            ("machine", "texts", "engine", "processor time, s"),
            [
                (run.machine, str(row["texts"]), row["engine"], f"{row['median_processor_s']:.2f}")
                for run in newest(runs, "embeddings")
                for row in run.results
            ],
        ),
        "transformers": (
            ("machine", "requests", "Foreword on transformers", "transformers' continuous batching"),
            [
                (run.machine, str(row["requests"]), *(_number(row[f"{name}_tok_cpu_s"]) for name in
                                                      ("foreword", "transformers")))
                for run in newest(runs, "transformers")
                for row in run.results
            ],
        ),
    }  # fmt: skip


def _by_model(run: Run, workloads: Iterable[str]) -> list[Sequence[str]]:
    """Return a row per model, engine and weights: the figure of each workload, and the memory at the end."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in run.results:
        groups.setdefault((row["model"], row["engine"], row["weights"]), []).append(row)
    return [
        (
            run.machine,
            *key,
            *(_number(figure(rows, name)) for name in workloads),
            _number(max(r["peak_mb"] for r in rows)),
        )
        for key, rows in groups.items()
    ]


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else _number(value)


def _spread(values: Sequence[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _quality(run: Run) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return a table of models by pairs of formats."""
    models = list(dict.fromkeys(row["model"] for row in run.results))
    cells = {
        (f"{row['weight_format']}, {row['kv_format']}", row["model"]): (
            f"{100 * row['change']:+.2f}{_error(row)} %, {row['mean_change']:.3f}, {100 * row['same_tokens']:.1f} %"
        )
        for row in run.results
    }
    pairs = list(dict.fromkeys(pair for pair, _ in cells))
    return ("weights, cache", *(f"`{model}`" for model in models)), [
        (pair, *(cells.get((pair, model), NONE) for model in models)) for pair in pairs
    ]


def _error(row: Mapping[str, Any]) -> str:
    """Return the standard error of a change, which runs of one text do not have."""
    return f" ± {100 * row['error']:.2f}" if "error" in row else ""


def _families(run: Run) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return a table of families by formats, with the ratios of all works in a cell."""
    formats = list(dict.fromkeys(row["weight_format"] for row in run.results))
    cells: dict[tuple[str, str], list[str]] = {}
    for row in run.results:
        cells.setdefault((row["family"], row["weight_format"]), []).append(f"{row['ratio']:.2f}")
    return ("family", *formats), [
        (family, *(", ".join(cells.get((family, one), [NONE])) for one in formats))
        for family in dict.fromkeys(row["family"] for row in run.results)
    ]


FORMATS = {
    "auto": "`auto` is the default format, with files in Q4_0 (the experts of gpt-oss in MXFP4)",
    "bf16": "in `bf16`, all weights are multiplied as bf16",
    "int8": "in `int8`, all weights are quantised to 8 bits",
    "q4": "in `q4`, all weights are quantised to 4 bits",
}


def _family_formats(run: Run) -> str:
    """Return a sentence on each column of the table of families."""
    given = dict.fromkeys(row["weight_format"] for row in run.results)
    return "\n".join(f"- {FORMATS[name]}" for name in given)


def _origins(runs: Sequence[Run]) -> list[Sequence[str]]:
    return [
        (run.question, run.machine, run.date, run.commit or "not recorded", f"`{run.command}`", run.note)
        for question in dict.fromkeys(run.question for run in runs)
        for run in newest(runs, question)
    ]
