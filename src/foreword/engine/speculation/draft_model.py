"""Drafts from a small model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreword.arrays import I32
from foreword.batch import BlockOps, InputBuffers, KVGroup, RequestStates, SamplingParams, prepare_inputs, step_needs
from foreword.cache import KVCacheManager
from foreword.engine.speculation.gone_rows import GoneRows
from foreword.errors import ConfigError
from foreword.executors import Capability, Executor
from foreword.sampling import Processors
from foreword.scheduler import admit

GREEDY = SamplingParams(temperature=0.0)
NO_BLOCKS: I32 = np.zeros(0, np.int32)


class DraftModelDrafter:
    """Mirrors rows of the target in states and blocks of its own, and runs the draft model on them.

    Prompts with embeddings, which are the target's alone, get no drafts.

    Drafts are drawn with the request's own seed and position, as the target draws: where both models agree on the
    distribution they draw the same token, sampled or greedy.

    Invariant of a mirrored row: the KV of its first num_computed tokens is in the draft cache. Tokens that are not the
    target's, drafts that were rejected, are cut off when drafts are next proposed for the row.

    A state cannot be cut: before the first draft is computed, the state after the known tokens is copied to a second
    block (`foreword.batch.state_indices`), from which the row continues if a draft was rejected.
    """

    def __init__(
        self,
        target: RequestStates,
        executor: Executor,
        *,
        kv_groups: Sequence[KVGroup],
        num_blocks: int,
        num_states: int = 0,
        max_num_batched_tokens: int,
        relative_cost: float,
    ) -> None:
        has_states = any(group.recurrent for group in kv_groups)
        if has_states and Capability.DRAFTED_STATES not in executor.capabilities:
            raise ConfigError(
                f"a draft model with a recurrent KV group: {type(executor).__name__} cannot restore its state after "
                "rejected drafts (Capability.DRAFTED_STATES); use a model without, or method='ngram'"
            )
        self.target, self.executor, self.relative_cost = target, executor, relative_cost
        self.states = RequestStates(
            max_num_reqs=target.max_num_reqs,
            max_model_len=target.max_model_len,
            vocab_size=target.vocab_size,
            kv_groups=list(kv_groups),
            max_num_draft_tokens=int(has_states),
        )
        self._gone = GoneRows(target)
        self._state_tables = [table.table for table in self.states.block_tables if table.group.recurrent]
        self._num_known = np.zeros(target.max_num_reqs, np.int32)  # by row: tokens of the target, when last mirrored
        self.cache = KVCacheManager(self.states, num_blocks, num_states=num_states, prefix_caching=False)
        self.buffers = InputBuffers.for_states(self.states, max_num_batched_tokens)
        self.processors = Processors(self.states)
        self._mirrored: dict[int, int] = {}  # target row → its mirror row

    def propose(self, rows: I32, most: I32) -> I32:
        """Propose drafts. Rows whose blocks do not fit the draft cache get none."""
        drafts = np.full((len(rows), self.target.max_num_draft_tokens), -1, np.int32)
        self._drop_gone()
        drafted = [i for i in np.flatnonzero(most > 0).tolist() if self._mirror(int(rows[i]), int(most[i]))]
        ours = np.array([self._mirrored[int(rows[i])] for i in drafted], np.int32)
        at = np.array(drafted, np.int64)
        for j in range(int(most.max(initial=0))):
            still = most[at] > j
            at, ours = at[still], ours[still]
            if not len(ours):
                break
            self._run_until_sampled(ours, self._kept_states(ours) if j == 1 else BlockOps.NONE)
            drafts[at, j] = self.states.token_ids[ours, self.states.num_tokens[ours] - 1]
        return drafts

    def _kept_states(self, rows: I32) -> BlockOps:
        """Return the copies that keep the states of these rows, which are those after the target's known tokens."""
        if not self._state_tables:
            return BlockOps.NONE
        return BlockOps(NO_BLOCKS, np.concatenate([table[rows, :2] for table in self._state_tables]))

    def _run_until_sampled(self, rows: I32, block_ops: BlockOps) -> None:
        """Compute every known token of these rows, within the buffers, until each has one more."""
        states, budget = self.states, self.buffers.max_num_batched_tokens
        goal = states.num_tokens[rows] + 1
        while True:
            left = states.num_tokens[rows] < goal
            if not left.any():
                return
            todo = rows[left]
            n = states.num_tokens[todo] - states.num_computed_tokens[todo]
            n = np.clip(budget - (np.cumsum(n) - n), 0, n).astype(np.int32)
            todo, n = todo[n > 0], n[n > 0]
            batch = prepare_inputs(states, (todo, n), self.buffers, block_ops=block_ops)
            block_ops = BlockOps.NONE
            sampling = self.processors.step(step_needs(batch))
            states.commit(batch, self.executor.launch(batch, sampling).result().token_ids)

    def _mirror(self, row: int, drafts: int) -> bool:
        """Update the mirror of a target row, with blocks for its drafts. False if these are not free."""
        target, states = self.target, self.states
        known = int(target.num_tokens[row])
        if row not in self._mirrored and not self._admit(row, known):
            return False
        ours = self._mirrored[row]
        start, computed = int(self._num_known[ours]), int(states.num_computed_tokens[ours])
        differs = states.token_ids[ours, start:computed] != target.token_ids[row, start:computed]
        right = min(start + int(differs.argmax()) if differs.any() else computed, known - 1)
        if right < computed and self._state_tables:
            right = start if start < known else 0
            states.num_accepted_tokens[ours] = 2  # the second of the two states
        states.num_computed_tokens[ours] = right
        states.token_ids[ours, :known] = target.token_ids[row, :known]
        states.num_tokens[ours] = self._num_known[ours] = known
        states.last_sampled_token[ours] = target.last_sampled_token[row]
        num_states = np.array([min(drafts - 1, 1)], np.int32) if self._state_tables else None
        return self.cache.grow_to(np.array([ours], np.int32), np.array([known + drafts]), num_states)

    def _admit(self, row: int, known: int) -> bool:
        if row in self.target.extras.prompt_embeds:
            return False
        hit = self.cache.miss(known)
        is_short = self.cache.blocks_to_admit(hit, known) > self.cache.pool.num_free
        if is_short or self.cache.states_to_admit(hit) > self.cache.state_pool.num_free:
            return False
        tokens = self.target.token_ids[row, :known]
        params = replace(self.target.sampling.params.get(row, GREEDY), logprobs=None, prompt_logprobs=None)
        ours, _ = admit(self.states, self.cache, str(row), tokens, hit, known, sampling_params=params)
        self.processors.update()
        self._mirrored[row] = ours
        self._num_known[ours] = 0
        return True

    def _drop_gone(self) -> None:
        for row in self._gone.take():
            if (ours := self._mirrored.pop(row, None)) is not None:
                self.cache.free(ours)
                self.states.remove_request(str(row))
