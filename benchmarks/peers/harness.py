"""Shared by all runners: the protocol, the timing, and the form of the results (JSON lines).

A runner is a script with a class that implements `Engine`, run in the environment of its peer:

    python run_llama_cpp.py --model FILE --name smollm2 --weights q8_0 --workloads W1,W6 --out results.jsonl

A result, one per line: engine, package, version, model (--name), weights, workload, repeat, threads, seconds,
num_prompt_tokens, num_output_tokens, output_tok_s (over the whole run, prompts included), prompt_tok_s and decode_tok_s
(W1: from a second run with one output token; workloads of one prompt: prompt_tok_s), load_s, peak_mb (of all processes,
10⁶ bytes; grows over a runner's life).
A workload that an engine cannot run gives a line with `skipped`: the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol

from workloads import NAMES, PROMPTS, Requests, make

WARM_UP = 1000  # number of the unmeasured repeat; no other repeat has its token ids
AGAIN = "W7 again"  # other requests with the prefix of W7, which the preceding run left in the cache


class Engine(Protocol):
    """engine: name of the row; package: its version is reported; cannot: unsupported workload → reason.

    longest: the tokens of the longest request of the run, its output included.
    """

    engine: str
    package: str
    cannot: ClassVar[dict[str, str]]

    def __init__(self, model: Path, weights: str, threads: int, longest: int) -> None: ...

    def generate(self, prompts: list[list[int]], output_lens: list[int], max_num_seqs: int) -> list[int]:
        """Generate greedily, ignoring stop tokens, for at most ``max_num_seqs`` concurrent requests. Return the tokens
        per prompt.
        """
        ...


def main(runner: type[Engine]) -> None:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--model", type=Path, required=True, help="file or directory that the engine loads")
    parser.add_argument("--name", required=True, help="the model's name in the results")
    parser.add_argument("--weights", required=True, help="number format of the weights, as the engine names it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5,W6,W7", help=f"among {', '.join(NAMES)}")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="results are appended to this file")
    args = parser.parse_args()
    names = args.workloads.split(",")
    unknown = set(names) - set(NAMES)
    if unknown:
        parser.error(f"--workloads: {', '.join(sorted(unknown))} not among {', '.join(NAMES)}")
    begin = time.perf_counter()
    engine = runner(args.model, args.weights, args.threads, max(make(name).longest for name in names))
    common = {
        "engine": engine.engine,
        "package": engine.package,
        "version": version(engine.package),
        "model": args.name,
        "weights": args.weights,
        "threads": args.threads,
        "load_s": round(time.perf_counter() - begin, 2),
    }
    with args.out.open("a") as out:
        for name in names:
            for result in _workload(engine, name, args.repeats):
                line = json.dumps({**common, **result, "peak_mb": round(_peak_mb())})
                print(line, file=out, flush=True)
                print(line, file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(0)  # some engines keep threads that do not terminate


def _workload(engine: Engine, name: str, repeats: int) -> list[dict[str, Any]]:
    if name in engine.cannot:
        return [{"workload": name, "skipped": engine.cannot[name]}]
    first = make(name, WARM_UP)
    _run(engine, first, [min(2, n) for n in first.output_lens])
    results = []
    for repeat in range(repeats):
        requests = make(name, repeat)
        result = _result(name, repeat, requests, _run(engine, requests, requests.output_lens))
        if name == "W1":
            prompt_s = _run(engine, make(name, WARM_UP + 1 + repeat), [1])
            result["prompt_tok_s"] = requests.num_prompt_tokens / prompt_s
            result["decode_tok_s"] = (requests.num_output_tokens - 1) / (result["seconds"] - prompt_s)
        if name in PROMPTS:
            result["prompt_tok_s"] = requests.num_prompt_tokens / result["seconds"]
        results.append(result)
        if name == "W7":
            again = _with_prefix_of(requests, make(name, WARM_UP + 1 + repeat))
            results.append(_result(AGAIN, repeat, again, _run(engine, again, again.output_lens)))
    return results


def _with_prefix_of(requests: Any, others: Any) -> Any:
    shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*requests.prompts[:2], strict=True))]
    prompts = [shared + prompt[len(shared) :] for prompt in others.prompts]
    return Requests(AGAIN, prompts, others.output_lens, others.max_num_seqs)


def _result(name: str, repeat: int, requests: Any, seconds: float) -> dict[str, Any]:
    return {
        "workload": name,
        "repeat": repeat,
        "seconds": seconds,
        "num_prompt_tokens": requests.num_prompt_tokens,
        "num_output_tokens": requests.num_output_tokens,
        "output_tok_s": requests.num_output_tokens / seconds,
    }


def _run(engine: Engine, requests: Any, output_lens: Sequence[int]) -> float:
    begin = time.perf_counter()
    counts = engine.generate(requests.prompts, list(output_lens), requests.max_num_seqs)
    seconds = time.perf_counter() - begin
    if list(counts) != list(output_lens):
        raise AssertionError(f"{requests.name}: {engine.engine} generated {counts} tokens, expected {output_lens}")
    return seconds


def _peak_mb() -> float:
    """Return the sum of the peak memory of this process and of each child, in 10⁶ bytes."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            for line in (process / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1])
            for task in (process / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue  # the process has ended
    return total * 1024 / 1e6
