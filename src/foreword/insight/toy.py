"""Run steps without a model: scheduler, cache and input layer with requests whose tokens are given."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from foreword.arrays import I32
from foreword.batch import (
    BlockOps,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    RequestStates,
    SamplingParams,
    prepare_inputs,
)
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError
from foreword.scheduler import Request, Scheduler, SchedulerConfig, StepPlan
from foreword.trace.recorder import TraceRecorder

TokenAt = Callable[[int, int], int]
"""Returns the id of a token: (number of the request, position) → id."""


def ids_by_place(max_model_len: int) -> TokenAt:
    """Return ids from which the place of a token can be read: 1000 + 100·r + p for position p of request r.

    For requests of more than 100 tokens, the next powers of ten are used: 10000 + 1000·r + p, and so on.
    """
    step = max(100, 10 ** len(str(max_model_len - 1)))
    return lambda request, position: 10 * step + step * request + position


class ToyEngine:
    """The real scheduler, cache and input layer, with given tokens instead of a model.

        while (batch := engine.prepare()) is not None:
            …
            engine.commit()

    Requests are numbered in the order of `add`; request r has the id str(r). A request ends at ``max_model_len``.
    plan, batch: those of the last prepared step. token_at: the tokens of prompts and the sampled tokens.
    """

    plan: StepPlan
    batch: InputBatch

    def __init__(
        self,
        token_at: TokenAt,
        *,
        max_num_reqs: int,
        budget: int,
        block_size: int,
        max_model_len: int,
        num_blocks: int | None = None,
        vocab_size: int | None = None,
        prefix_caching: bool = False,
        max_num_draft_tokens: int = 0,
    ) -> None:
        self.token_at, self._max_model_len = token_at, max_model_len
        self.states = RequestStates(
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size or token_at(max_num_reqs, max_model_len) + 1,
            kv_groups=[KVGroup(block_size=block_size)],
            max_num_draft_tokens=max_num_draft_tokens,
        )
        num_blocks = num_blocks or 1 + max_num_reqs * self.states.block_tables[0].width
        self.cache = KVCacheManager(self.states, num_blocks, prefix_caching=prefix_caching, partial_reuse=False)
        config = SchedulerConfig(max_num_seqs=max_num_reqs, max_num_batched_tokens=budget, watermark=0.0)
        self.scheduler = Scheduler(self.states, self.cache, config)
        self.buffers = InputBuffers.for_states(self.states, max_num_batched_tokens=budget)
        self._num_requests = 0

    def add(self, prompt_len: int) -> None:
        """Queue a request whose prompt has this many tokens."""
        r = self._num_requests
        prompt = np.array([self.token_at(r, p) for p in range(prompt_len)], np.int32)
        request = Request(
            request_id=str(r), prompt=prompt, arrival=r, max_len=self._max_model_len, params=SamplingParams()
        )
        self.scheduler.add(request)
        self._num_requests += 1

    def prepare(self) -> InputBatch | None:
        """Plan and prepare the next step. None if no request can run."""
        self.plan = plan = self.scheduler.schedule()
        if not len(plan.rows):
            return None
        self.batch = prepare_inputs(
            self.states, (plan.rows, plan.num_scheduled), self.buffers,
            draft_tokens=plan.draft_tokens, block_ops=plan.block_ops,
        )  # fmt: skip
        return self.batch

    def samples(self) -> I32:
        """Return the tokens that the prepared step samples, int32 [B], for a step without drafts."""
        numbers, at = map(int, self.batch.req_ids), self.states.num_tokens[self.plan.rows].tolist()
        return np.array([self.token_at(r, p) for r, p in zip(numbers, at, strict=True)], np.int32)

    def commit(self, samples: I32 | None = None) -> None:
        """Commit the step that was prepared last. samples: int32 [B] or [B, 1 + drafts], by default `samples`."""
        self.states.commit(self.batch, self.samples() if samples is None else samples)
        self.scheduler.commit(self.plan)
        full = self.plan.rows[self.states.num_tokens[self.plan.rows] >= self._max_model_len]
        if len(full):
            self.scheduler.finish(full)


class _NumberedFromZero:
    """A copy of the requests of an engine, in states whose blocks are numbered from 0 and whose empty entries are
    −1.
    """

    def __init__(self, engine: ToyEngine, budget: int) -> None:
        source = engine.states
        self._source = source
        self.states = RequestStates(
            max_num_reqs=source.max_num_reqs,
            max_model_len=source.max_model_len,
            vocab_size=source.vocab_size,
            kv_groups=[table.group for table in source.block_tables],
            null_block=-1,
        )
        self._buffers = InputBuffers.for_states(self.states, max_num_batched_tokens=budget)

    def prepare(self, batch: InputBatch) -> InputBatch:
        """Return the same step with block numbers that are smaller by one."""
        (theirs,), (ours,) = self._source.block_tables, self.states.block_tables
        for b, row in enumerate(batch.idx_mapping.tolist()):
            req_id, blocks = batch.req_ids[b], theirs.table[row, : theirs.num_blocks[row]] - 1
            if req_id not in self.states:
                prompt = self._source.token_ids[row, : self._source.prompt_len[row]]
                self.states.add_request(NewRequest(req_id, prompt, [blocks]))
            num_held = int(ours.num_blocks[self.states.row_of(req_id)])
            self.states.append_blocks(req_id, [blocks[num_held:]])
        return prepare_inputs(
            self.states, dict(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True)), self._buffers
        )

    def leave(self, batch: InputBatch) -> None:
        """Remove the requests of a batch that have left the engine."""
        for req_id in batch.req_ids:
            if req_id not in self._source:
                self.states.remove_request(req_id)


def toy_steps(
    prompt_lens: Sequence[int],
    *,
    budget: int,
    block_size: int,
    max_model_len: int,
    steps: int,
    record: Path | None = None,
    null_block: int = 0,
    token_at: TokenAt | None = None,
    vocab_size: int | None = None,
) -> Iterator[InputBatch]:
    """Prepare up to ``steps`` steps for requests "0", "1", … with these prompt lengths, each valid until the next one.

    record: a file in which the steps are recorded, as a trace. null_block: 0, or −1 for blocks that are numbered from
    0. token_at: the tokens of prompts and the sampled tokens, by default `ids_by_place`. vocab_size: by default the
    smallest size with these ids.
    """
    if not prompt_lens or not all(1 <= length < max_model_len for length in prompt_lens):
        raise ConfigError(
            f"prompt_lens={reprlib.repr(prompt_lens)}: give at least one length, each in [1, {max_model_len - 1}] "
            "(max_model_len − 1)"
        )
    engine = ToyEngine(
        token_at or ids_by_place(max_model_len),
        max_num_reqs=len(prompt_lens),
        budget=budget,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    other = _NumberedFromZero(engine, budget) if null_block == -1 else None
    states = engine.states if other is None else other.states
    trace = None if record is None else TraceRecorder(record, states, budget)
    for length in prompt_lens:
        engine.add(length)
    for _ in range(steps):
        planned = engine.prepare()
        if planned is None:
            break
        batch = planned if other is None else other.prepare(planned)
        yield batch
        if trace is not None:
            trace.step(batch)
        samples = engine.samples()
        if other is not None:
            states.commit(batch, samples)
        engine.commit(samples)
        if trace is not None:
            trace.commit(batch, samples)
        if other is not None:
            other.leave(planned)
    if trace is not None:
        trace.close()


def given_step(
    scheduled: Sequence[int],
    computed: Sequence[int],
    *,
    block_size: int,
    max_model_len: int,
    null_block: int = 0,
    prompt_lens: Sequence[int] | None = None,
    block_ids: Sequence[Sequence[int]] | None = None,
    record: Path | None = None,
) -> Iterator[InputBatch]:
    """Prepare one step of requests "0", "1", … that have computed[i] tokens already and compute scheduled[i] now.

    prompt_lens: by default the computed tokens if the request computes one token now, because it then generates; else
    all tokens. block_ids: the blocks of each request, by default as many as its tokens need, numbered in order. record:
    as for `toy_steps`.
    """
    ends = [c + n for c, n in zip(computed, scheduled, strict=True)]
    prompts = prompt_lens or [c if c and n == 1 else c + n for c, n in zip(computed, scheduled, strict=True)]
    token_at = ids_by_place(max_model_len)
    states = RequestStates(
        max_num_reqs=len(scheduled),
        max_model_len=max_model_len,
        vocab_size=token_at(len(scheduled), max_model_len) + 1,
        kv_groups=[KVGroup(block_size=block_size)],
        null_block=null_block,
    )
    trace = None if record is None else TraceRecorder(record, states, sum(scheduled))
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=sum(scheduled))
    first = null_block + 1
    for r, (prompt_len, end) in enumerate(zip(prompts, ends, strict=True)):
        count = -(-end // block_size)
        tokens = [token_at(r, p) for p in range(max(prompt_len, end))]
        blocks = range(first, first + count) if block_ids is None else block_ids[r]
        states.add_request(
            NewRequest(
                str(r), tokens[:prompt_len], [blocks],
                output_token_ids=tokens[prompt_len:], num_computed_tokens=computed[r],
            )
        )  # fmt: skip
        first += count
    batch = prepare_inputs(states, {str(r): n for r, n in enumerate(scheduled)}, buffers, block_ops=BlockOps.NONE)
    yield batch
    if trace is not None:
        trace.step(batch)
        trace.close()
