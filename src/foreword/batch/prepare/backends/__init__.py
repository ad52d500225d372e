"""Three ways to compute a step, bit for bit equal: `loops` defines, `vectorized` and `native` compute.

Each is ``run(states, buffers, plan, padded, gather) -> Scalars`` and writes every array of the buffers. The plan has
been checked (`foreword.batch.prepare.plan.check`); `native` checks it itself, in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Scalars(NamedTuple):
    """The scalars of a step, in the order the native core returns them."""

    num_reqs: int
    num_tokens: int
    num_reqs_padded: int
    num_tokens_padded: int
    num_logits: int
    num_draft_tokens: int
    max_query_len: int
    max_seq_len: int
    attention_state: int
    num_unresolved: int  # requests with placeholders


# (states, buffers, plan, (pad tokens, pad requests), gather block tables) → the step's scalars
Run = Callable[[Any, Any, Any, tuple[int | None, int | None], bool], Scalars]
