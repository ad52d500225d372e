"""transformers' continuous batching and Foreword from arrays: one table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from importlib.metadata import version

import torch

from foreword.bench.traffic import WORKLOADS
from host.contenders import FromArrays
from host.measure import measure
from host.transformers_runner import TransformersRunner


def run(args: argparse.Namespace) -> None:
    """Compare every workload without drafts."""
    versions = {name: version(name) for name in ("transformers", "torch", "numpy", "foreword")}
    if not args.json:
        print(f"{'prepare, median µs':<24}{'transformers':>14}{'foreword':>10}{'ratio':>9}", flush=True)
    for workload in WORKLOADS:
        if workload.num_drafts or not workload.name.startswith(args.only):
            continue
        steps = list(workload.steps(args.steps))
        contenders = [TransformersRunner(workload), FromArrays(workload, args.steps)]
        with torch.inference_mode():
            theirs, ours = measure(workload.name, steps, lambda _: None, contenders, turn=args.turn, nice=args.nice)
        if args.json:
            costs = [asdict(theirs), asdict(ours)]
            print(json.dumps({"workload": workload.name, "turn": args.turn, "costs": costs, **versions}), flush=True)
            continue
        ratio = theirs.prepare_us / ours.prepare_us
        print(f"{workload.name:<24}{theirs.prepare_us:>14.1f}{ours.prepare_us:>10.2f}{ratio:>8.0f}x", flush=True)
