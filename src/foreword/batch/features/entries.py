"""Whose each entry of a tensor is, for messages that name the request."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch.step.tensors import BatchTensors


def entry_owners(batch: BatchTensors, axis: str, size: int) -> I64:
    """Return int64 [size], the request of the batch that each entry of an axis belongs to, −1 for padding.

    axis: a symbol of docs/tensors.md: T, L, D, B or B+1, with or without padding. Of offsets (B+1) entry b + 1 belongs
    to request b, which ends there, and entry 0 to the first.
    """
    requests = np.arange(batch.num_reqs)
    of_axis: dict[str, AnyArray] = {
        "T": batch.req_indices,
        "L": np.repeat(requests, batch.num_draft_tokens + 1),
        "D": np.repeat(requests, batch.num_draft_tokens),
        "B+1": np.concatenate((requests[:1], requests)),
    }
    owner = of_axis.get(axis.replace("p", ""), requests)
    out = np.full(size, -1, np.int64)
    out[: len(owner)] = owner[:size]
    return out
