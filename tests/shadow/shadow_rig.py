"""A shadow of the foreign engine, and one step of both."""

import copy
from collections.abc import Callable
from typing import Any

from foreign_engine import Engine

from foreword.batch import KVGroup, RequestStates
from foreword.shadow import Finding, Shadow


def states_of(engine: Engine) -> RequestStates:
    return RequestStates(
        max_num_reqs=engine.rows,
        max_model_len=engine.length,
        vocab_size=50,
        kv_groups=[KVGroup(group.block_size, sliding_window=group.window) for group in engine.groups],
        max_num_draft_tokens=engine.most_drafts,
    )


def shadow_of(engine: Engine, **settings: Any) -> Shadow:
    states = states_of(engine)
    return Shadow(states, max_num_batched_tokens=engine.budget, num_blocks=engine.num_blocks, **settings)


def followed(engine: Engine, shadow: Shadow, change: Callable[[Any], object] | None = None) -> list[Finding]:
    """One step of the engine, and what the shadow finds in it. change: of the decision as the shadow gets it."""
    out = engine.decide()
    told = out
    if change is not None:
        told = copy.deepcopy(out)
        change(told)
    shadow.decide(told)
    req_ids, tensors = engine.prepare(out)
    found = shadow.step(req_ids, tensors)
    sampled = engine.sample(out)
    found += shadow.commit(sampled)
    engine.finish_step(out, sampled)
    return found
