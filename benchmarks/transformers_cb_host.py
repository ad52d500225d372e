"""What preparing a step costs the host in transformers' continuous batching and in Foreword, on the same steps.

    python benchmarks/transformers_cb_host.py [--only S1] [--json]

transformers is the installed package, unchanged: `ContinuousBatchingIOs.prepare_batch_tensors` and `get_model_kwargs`
over a real `PagedAttentionCache` with pages of 256 tokens, its default. Only that is timed, where Foreword's time holds
its state changes too. input_ids, positions and query_start_loc must be equal. It has no speculative steps (no S5).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from peers.environments import run_inside


def main() -> None:
    parser = argparse.ArgumentParser(description="A step's preparation: transformers' continuous batching, Foreword.")
    parser.add_argument("--peers", type=Path, help="directory of the environments (default ~/.cache/foreword/peers)")
    parser.add_argument("--steps", type=int, default=150, help="steps of each workload")
    parser.add_argument("--turn", type=int, default=25, help="steps of one contender before the next one's turn")
    parser.add_argument("--only", default="", help="workloads whose names start so: S1, 'S1 decode 64', …")
    parser.add_argument("--nice", type=int, help="of the timed part, as -20 where the machine is not quiet (root)")
    parser.add_argument("--json", action="store_true", help="print JSON, one workload a line")
    args = parser.parse_args()
    run_inside(args.peers, "transformers", variables={"OMP_NUM_THREADS": "1"})

    from importlib.metadata import version

    import torch
    from host.contenders import FromArrays
    from host.measure import measure
    from host.transformers_runner import TransformersRunner

    from foreword.bench.traffic import WORKLOADS

    versions = {name: version(name) for name in ("transformers", "torch", "numpy", "foreword")}
    if not args.json:
        print(f"{'prepare a step, median µs':<24}{'transformers':>14}{'foreword':>10}{'ratio':>9}", flush=True)
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


if __name__ == "__main__":
    main()
