"""Find the request of each entry of a tensor, for messages that name the request."""

from __future__ import annotations

import numpy as np

from foreword.arrays import I64, AnyArray
from foreword.batch.step.tensors import BatchTensors


def entry_owners(batch: BatchTensors, axis: str, size: int) -> I64:
    """Return int64 [size], the request of the batch to which each entry of an axis belongs, −1 for padding.

    axis: a symbol of docs/tensors.md: T, L, D, B or B+1, with or without padding. For offsets (B+1), entry b + 1
    belongs to request b, which ends there, and entry 0 to the first request.
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
