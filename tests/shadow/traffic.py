"""Random traffic of the foreign engine under a shadow: python tests/shadow/traffic.py --steps 10000

Healthy steps have no finding. In every other run an entry of a tensor is changed in some steps: each is named, by its
tensor and request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from foreign_engine import Engine, Group
from shadow_rig import followed, shadow_of

TRAFFIC: Mapping[str, tuple[list[Group], dict[str, Any]]] = {
    "full": ([Group(4)], {}),
    "drafts": ([Group(4)], {"most_drafts": 3, "num_blocks": 30}),
    "window": ([Group(4), Group(4, 11)], {"num_blocks": 44, "adapters": 2}),
    "two sizes and drafts": ([Group(8), Group(4, 9)], {"most_drafts": 2, "num_blocks": 40}),
}
OWNERS = {
    "T": ("input_ids", "positions", "req_indices", "lora_tokens", "slot_mapping"),
    "B": ("seq_lens", "num_computed_tokens", "num_scheduled_tokens", "bonus_logits_indices", "discard_mask"),
    "L": ("logits_indices",),
    "D": ("draft_token_ids", "target_logits_indices"),
    "": ("max_query_len", "max_seq_len", "num_tokens", "num_reqs"),
    "K": ("block_table",),
}
AXIS = {name: axis for axis, names in OWNERS.items() for name in names}


class Change(NamedTuple):
    """An entry of a tensor that was changed, and its request."""

    tensor: str
    request: str | None


def change_an_entry(
    engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], rng: np.random.Generator
) -> Change | None:
    """Change one entry of one tensor of a step. None where the tensor that was drawn has none."""
    rows = engine.runner.batch(out)
    name = list(AXIS)[int(rng.integers(len(AXIS)))]
    axis, g = AXIS[name], int(rng.integers(len(engine.groups)))
    if not rows:
        return None
    if axis == "":
        tensors[name] += 1
        return Change(name, None)
    array = tensors[name][g] if name in ("slot_mapping", "block_table") else tensors[name]
    if not len(array):
        return None
    at = int(rng.integers(len(array)))
    if axis == "K":
        row, group = rows[at], engine.groups[g]
        end = row.computed + out.num_scheduled_tokens[row.rid]
        first = 0 if group.window is None else max(row.computed - group.window + 1, 0) // group.block_size
        array[at, int(rng.integers(first, -(-end // group.block_size)))] += 1
        return Change(name, row.rid)
    array[at] = not array[at] if array.dtype == bool else array[at] + 1
    sizes = {"B": lambda n, k: 1, "T": lambda n, k: n, "L": lambda n, k: 1 + k, "D": lambda n, k: k}[axis]
    counts = [
        sizes(out.num_scheduled_tokens[row.rid], len(out.scheduled_spec_decode_tokens.get(row.rid, ()))) for row in rows
    ]
    return Change(name, rows[int(np.searchsorted(np.cumsum(counts), at, side="right"))].rid)


def run(kind: str, seed: int, steps: int, share_changed: float) -> Engine:
    """Follow an engine with an entry changed in this share of its steps. AssertionError: a miss or a false alarm."""
    groups, settings = TRAFFIC[kind]
    engine, rng = Engine(groups, seed, **settings), np.random.default_rng(seed)
    shadow, changes = shadow_of(engine), list[Change]()

    def fault(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any]) -> None:
        if rng.random() < share_changed and (change := change_an_entry(engine, out, tensors, rng)) is not None:
            changes.append(change)

    engine.fault = fault
    for step in range(steps):
        changes.clear()
        found = followed(engine, shadow)
        named = [Change(f.tensor, f.request) for f in found if f.tensor != "cache"]
        assert named == changes, (kind, seed, step, changes, [str(f) for f in found])
        # A slot or entry that was changed leads to keys that are missing, now and where they were written over.
        assert all(f.origin == "runner" for f in found), (kind, seed, step, [str(f) for f in found])
        assert share_changed or not found
    assert share_changed or shadow.report().ok
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of each kind of traffic, healthy and changed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kind in TRAFFIC:
        for share in (0.0, 0.3):
            started, runs = time.perf_counter(), max(options.steps // 1000, 1)
            engines = [run(kind, options.seed + i, options.steps // runs, share) for i in range(runs)]
            hits, preempted = (sum(getattr(e.scheduler, n) for e in engines) for n in ("num_hits", "num_preemptions"))
            print(
                f"{kind}, {share:.0%} of the steps changed: {options.steps} steps, {hits} prefix hits, "
                f"{preempted} preemptions, {time.perf_counter() - started:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
