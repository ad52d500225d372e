"""Run random traffic with shared prefixes and aborts through an engine, and each of its requests alone."""

from collections.abc import Iterator

import numpy as np

from foreword.batch import ContextParallel, SamplingParams
from foreword.engine import Engine, engine_config
from foreword.executors.host import HostExecutor
from foreword.executors.pool import batch_groups
from foreword.models.spec import DecoderSpec

BLOCK_SIZE = 16


def engine(
    executor: HostExecutor, spec: DecoderSpec, *, num_blocks: int, num_context_ranks: int = 1, **config: object
) -> Engine:
    cp = ContextParallel(num_context_ranks, 0) if num_context_ranks > 1 else None
    return Engine(
        executor,
        vocab_size=spec.vocab_size,
        max_model_len=200,
        kv_groups=batch_groups(spec, BLOCK_SIZE, context_parallel=cp is not None),
        context_parallel=cp,
        num_blocks=num_blocks,
        config=engine_config({"block_size": BLOCK_SIZE, "check": "full", **config}),
    )


def requests(rng: np.random.Generator, vocab_size: int) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Prompts that share beginnings and repeat themselves, so that there are prefix hits and accepted drafts."""
    stems = [rng.integers(0, vocab_size, 70).tolist() for _ in range(3)]
    for i in range(16):
        tail = rng.integers(0, vocab_size, rng.integers(1, 6)).tolist() * int(rng.integers(1, 5))
        prompt = stems[rng.integers(3)][: rng.integers(1, 70)] + tail
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            top_k=int(rng.choice([0, 5])),
            max_tokens=int(rng.integers(1, 30)),
            seed=i,
            logprobs=2 if i % 5 == 0 else None,
        )
        yield f"r{i}", prompt, params


def assert_traffic_changes_nothing(crowd: Engine, alone: Engine, vocab_size: int) -> None:
    """Requests that arrive at random steps in ``crowd``, some of them aborted, get the tokens that they get alone."""
    rng = np.random.default_rng(4)
    wanted = list(requests(rng, vocab_size))
    waiting, got, aborted = list(wanted), {}, set()
    while waiting or crowd.has_work:
        while waiting and rng.random() < 0.5:
            crowd.add_request(*waiting.pop(0))
        if rng.random() < 0.03 and not waiting:
            victim = str(rng.choice([r for r, _, _ in wanted]))
            if victim not in got and crowd.abort(victim) is not None:
                aborted.add(victim)
        for output in crowd.step():
            if output.finished:
                got[output.request_id] = output.outputs[0].token_ids
    crowd.close()
    assert crowd.cache.pool.num_used == 0
    for request_id, prompt, params in wanted:
        if request_id in aborted:
            continue
        alone.add_request(request_id, prompt, params)
        while alone.has_work:
            outputs = alone.step()
        assert got[request_id] == outputs[0].outputs[0].token_ids, request_id
