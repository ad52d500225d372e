"""The inputs of a captured graph for a step: the lengths promised to the graph replace those of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from foreword.arrays import I32
from foreword.batch.step.tensors import BatchTensors
from foreword.batch.values.graph_promise import GraphPromise
from foreword.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """Inputs of a graph that was captured with the lengths of a promise.

    query_start_loc: int32 [Bp + 1], ascending. seq_lens: int32 [Bp], 0 for the requests of padding.
    max_query_len, max_seq_len: those of the promise. All other tensors are those of the batch with their padding: ids
    and positions 0, slots −1, null blocks. A padding request reads and writes no key.
    """

    query_start_loc: I32
    seq_lens: I32
    max_query_len: int
    max_seq_len: int


def graph_inputs(
    batch: BatchTensors, promise: GraphPromise, *, padding_requests: Literal["empty", "tokens"] = "empty"
) -> GraphInputs:
    """Return the step for a graph with this promise, at stable addresses; valid as long as the batch is.

    padding_requests: the requests to which the padding tokens T … Tp − 1 belong.
        "empty"   no request: query_start_loc[b] = T for b > B
        "tokens"  the requests of padding, for kernels whose last offset must be the number of rows, and which divide
                  by a uniform length: query_start_loc[B + i] = min(T + i · max_query_len, Tp)

    Capture with the promise's sizes: ``make_dummy(states, buffers, num_tokens=promise.num_tokens,
    num_reqs=promise.num_reqs)`` keeps it, and so has the same values here as every step that replays the graph.
    Raise PlanError for a step that breaks the promise, by request and rule, for one that is padded to other sizes, and
    where the requests of padding cannot hold its tokens.
    """
    B, Bp, Tp = batch.num_reqs, batch.num_reqs_padded, batch.num_tokens_padded
    broken = promise.broken_by(batch.num_scheduled_tokens, batch.seq_lens[:B])
    if broken is not None:
        request = None if broken.request is None else batch.req_ids[broken.request]
        raise PlanError("the step breaks what the graph was promised: use a larger graph, or none", step=batch.step,
                        request=request, tensor=broken.tensor, index=broken.request, expected=broken.expected,
                        got=broken.got)  # fmt: skip
    sizes = promise.num_tokens, promise.num_reqs
    if (Tp, Bp) != sizes:
        raise PlanError("the step is padded to other sizes than the graph: pass them as pad_to", step=batch.step,
                        tensor="pad_to", expected=sizes, got=(Tp, Bp))  # fmt: skip
    if padding_requests == "empty":
        return GraphInputs(batch.query_start_loc, batch.seq_lens, promise.max_query_len, promise.max_seq_len)
    room = batch.num_tokens + (Bp - B) * promise.max_query_len
    if room < Tp:
        raise PlanError("the requests of padding cannot hold the tokens of padding: pad to fewer tokens or more "
                        "requests", step=batch.step, tensor="num_tokens_padded", expected=f"at most {room}",
                        got=Tp)  # fmt: skip
    loc: I32 = batch.optional("graph_query_start_loc")[: Bp + 1]
    loc[: B + 1] = batch.query_start_loc[: B + 1]
    np.minimum(batch.num_tokens + np.arange(1, Bp - B + 1) * promise.max_query_len, Tp, out=loc[B + 1 :],
               casting="same_kind")  # fmt: skip
    return GraphInputs(loc, batch.seq_lens, promise.max_query_len, promise.max_seq_len)
