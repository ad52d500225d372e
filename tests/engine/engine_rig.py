"""An engine on the oracle model."""

import time

import numpy as np
from oracle_model import START, LetterTokenizer, OracleExecutor, following, logits_after

from foreword.batch import KVGroup, SamplingParams
from foreword.engine import Engine, EngineObserver, RequestOutput, engine_config

V = 30


def make_engine(
    *,
    blocks: int = 65,
    num_states: int = 0,
    M: int = 64,
    groups=None,
    executor=OracleExecutor,
    eos=(),
    tokenizer=None,
    drafter=None,
    observers=(),
    logits_processors=(),
    tiers=(),
    clock=time.perf_counter,
    **config,
) -> Engine:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "watermark": 0.0}
    settings |= {"check": "full"} | config
    groups = groups or [KVGroup(settings["block_size"])]
    return Engine(
        executor(V, groups, blocks, num_states) if num_states else executor(V, groups, blocks),
        vocab_size=V,
        max_model_len=M,
        kv_groups=groups,
        num_blocks=blocks,
        num_states=num_states,
        config=engine_config(settings),
        tokenizer=LetterTokenizer(),
        eos_token_ids=eos,
        drafter=drafter,
        observers=observers,
        logits_processors=logits_processors,
        tiers=tiers,
        clock=clock,
    )


def run(engine: Engine, max_steps: int = 5000) -> dict[str, RequestOutput]:
    """Step until nothing is left. The final output of each request."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs
                outputs[output.request_id] = output
    assert not engine.has_work
    assert engine.cache.pool.num_used == engine.cache.state_pool.num_used == 0
    return outputs


def answer(prompt, params: SamplingParams | None = None, *, grammar=None, **config) -> RequestOutput:
    """The output of one request on an engine of its own; ``config`` is that of `make_engine`."""
    engine = make_engine(**config)
    engine.add_request("a", prompt, params, grammar=grammar)
    output = run(engine)["a"]
    engine.close()
    return output


def run_through(engine: Engine, failure: type[Exception]) -> tuple[dict[str, list[list[int]]], int]:
    """Step until nothing is left, although steps raise. The tokens of each request, and the number of failures."""
    done, failures = {}, 0
    while engine.has_work:
        try:
            done |= token_ids({o.request_id: o for o in engine.step()})
        except failure:
            failures += 1
    engine.close()
    assert engine.cache.pool.num_used == engine.cache.state_pool.num_used == 0
    return done, failures


def token_ids(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    """Request id → the tokens of each of its completions."""
    return {request_id: [c.token_ids for c in output.outputs] for request_id, output in outputs.items()}


class OnStep(EngineObserver):
    """Calls a function with the plan and the batch of every step before it runs."""

    def __init__(self, function) -> None:
        self.step_planned = function


class Guesser:
    """Drafts from the model itself, of which about half are made wrong."""

    relative_cost = 0.0

    def __init__(self, states) -> None:
        self.states = states

    def propose(self, rows, most):
        drafts = np.full((len(rows), self.states.max_num_draft_tokens), -1, np.int32)
        for i, row in enumerate(rows.tolist()):
            known = int(self.states.num_tokens[row])
            prefix = START
            for token in self.states.token_ids[row, :known].tolist():
                prefix = following(prefix, token)
            for j in range(int(most[i])):
                guess = int(logits_after(prefix, V).argmax()) if (known + j) % 2 else 3
                drafts[i, j] = guess
                prefix = following(prefix, guess)
        return drafts
