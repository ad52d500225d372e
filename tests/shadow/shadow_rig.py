"""A shadow of the foreign engine, and one step of both."""

from typing import Any

from foreign_engine import Engine

from foreword.batch import KVGroup, RequestStates
from foreword.shadow import Finding, Shadow


def shadow_of(engine: Engine, **settings: Any) -> Shadow:
    states = RequestStates(
        max_num_reqs=engine.rows,
        max_model_len=engine.length,
        vocab_size=50,
        kv_groups=[KVGroup(group.block_size, sliding_window=group.window) for group in engine.groups],
        max_num_draft_tokens=engine.most_drafts,
    )
    return Shadow(states, max_num_batched_tokens=engine.budget, num_blocks=engine.num_blocks, **settings)


def followed(engine: Engine, shadow: Shadow) -> list[Finding]:
    """One step of the engine, and what the shadow finds in it."""
    out = engine.decide()
    shadow.decide(out)
    req_ids, tensors = engine.prepare(out)
    found = shadow.step(req_ids, tensors)
    sampled = engine.sample(out)
    found += shadow.commit(sampled)
    engine.finish_step(out, sampled)
    return found
