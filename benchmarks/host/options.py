"""The command line of the host comparisons."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(description: str, *, steps: int, has_device: bool = False) -> argparse.Namespace:
    """Parse the options of a comparison. steps: the default number of steps per workload. has_device: it compares steps
    of a GPU too.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--peers", type=Path, help="directory of the environments (default ~/.cache/foreword/peers)")
    parser.add_argument("--steps", type=int, default=steps, help="steps per workload")
    parser.add_argument(
        "--turn", type=int, default=25, help="consecutive steps of one contender; 1: colder caches (default 25)"
    )
    parser.add_argument("--only", default="", help="workloads whose names start with this: S1, 'S1 decode 64', …")
    parser.add_argument("--nice", type=int, help="priority of the timed part, such as -20 on a busy machine (root)")
    parser.add_argument("--json", action="store_true", help="print JSON, one workload per line")
    if has_device:
        parser.add_argument("--device", action="store_true", help="steps of a GPU, whose calls do nothing")
    return parser.parse_args()
