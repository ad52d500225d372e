"""Steps without a model: scheduler, cache and input layer on requests of given lengths."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from foreword.batch import InputBatch, InputBuffers, KVGroup, RequestStates, SamplingParams, prepare_inputs
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError
from foreword.scheduler import Request, Scheduler, SchedulerConfig
from foreword.trace.recorder import TraceRecorder


def toy_steps(
    prompt_lens: Sequence[int],
    *,
    budget: int,
    block_size: int,
    max_model_len: int,
    steps: int,
    record: Path | None = None,
) -> Iterator[InputBatch]:
    """Prepare up to ``steps`` steps for requests "0", "1", … with these prompt lengths, each valid until the next one.

    record: a file that the steps are recorded in, as a trace.
    Token p of request r has the id 1000 + 100 r + p, sampled tokens too, so that an id encodes its origin.
    """
    if not prompt_lens or not all(1 <= length < max_model_len for length in prompt_lens):
        raise ConfigError(
            f"prompt_lens={reprlib.repr(prompt_lens)}: give at least one length, each in [1, {max_model_len - 1}] "
            "(max_model_len − 1)"
        )
    states = RequestStates(
        max_num_reqs=len(prompt_lens),
        max_model_len=max_model_len,
        vocab_size=1000 + 100 * len(prompt_lens) + max_model_len,
        kv_groups=[KVGroup(block_size=block_size)],
    )
    num_blocks = 1 + len(prompt_lens) * states.block_tables[0].width
    cache = KVCacheManager(states, num_blocks, prefix_caching=False)
    scheduler = Scheduler(
        states, cache, SchedulerConfig(max_num_seqs=len(prompt_lens), max_num_batched_tokens=budget, watermark=0.0)
    )
    trace = None if record is None else TraceRecorder(record, states, budget)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=budget)
    for r, length in enumerate(prompt_lens):
        prompt = np.arange(1000 + 100 * r, 1000 + 100 * r + length, dtype=np.int32)
        scheduler.add(
            Request(request_id=str(r), prompt=prompt, arrival=r, max_len=max_model_len, params=SamplingParams())
        )
    for _ in range(steps):
        plan = scheduler.schedule()
        if not len(plan.rows):
            break
        batch = prepare_inputs(states, (plan.rows, plan.num_scheduled), buffers)
        yield batch
        numbers = np.array([int(r) for r in batch.req_ids], np.int32)
        tokens = (1000 + 100 * numbers + states.num_tokens[plan.rows]).astype(np.int32)
        if trace is not None:
            trace.step(batch)
        states.commit(batch, tokens)
        if trace is not None:
            trace.commit(batch, tokens)
        scheduler.commit(plan)
        full = plan.rows[states.num_tokens[plan.rows] >= max_model_len]
        if len(full):
            scheduler.finish(full)
    if trace is not None:
        trace.close()
