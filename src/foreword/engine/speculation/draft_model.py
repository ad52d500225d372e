"""Drafts from a small model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreword.arrays import I32
from foreword.batch import InputBuffers, KVGroup, RequestStates, SamplingParams, prepare_inputs, step_needs
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError
from foreword.executors import Executor
from foreword.sampling import Processors
from foreword.scheduler import admit

GREEDY = SamplingParams(temperature=0.0)


class DraftModelDrafter:
    """Mirrors rows of the target in states and blocks of its own, and runs the draft model on them.

    Prompts with embeddings, which are the target's alone, get no drafts.

    Drafts are drawn with the request's own seed and position, as the target draws: where both models agree on the
    distribution they draw the same token, sampled or greedy.

    Invariant of a mirrored row: its first num_computed tokens are the target's, and their KV is in the draft cache.
    Rejected drafts are cut off when drafts are next proposed for the row.
    """

    def __init__(
        self,
        target: RequestStates,
        executor: Executor,
        *,
        kv_groups: Sequence[KVGroup],
        num_blocks: int,
        max_num_batched_tokens: int,
        relative_cost: float,
    ) -> None:
        if any(group.recurrent for group in kv_groups):
            raise ConfigError(
                "a draft model with a recurrent KV group: its state after rejected drafts cannot be restored; "
                "use a model without, or method='ngram'"
            )
        self.target, self.executor, self.relative_cost = target, executor, relative_cost
        self.states = RequestStates(
            max_num_reqs=target.max_num_reqs,
            max_model_len=target.max_model_len,
            vocab_size=target.vocab_size,
            kv_groups=list(kv_groups),
        )
        self.cache = KVCacheManager(self.states, num_blocks, prefix_caching=False)
        self.buffers = InputBuffers.for_states(self.states, max_num_batched_tokens)
        self.processors = Processors(self.states)
        self._mirrored: dict[int, tuple[int, int]] = {}  # target row → its generation, and its mirror row

    def propose(self, rows: I32, most: I32) -> I32:
        """Rows whose blocks do not fit the draft cache get no drafts."""
        drafts = np.full((len(rows), self.target.max_num_draft_tokens), -1, np.int32)
        self._drop_gone()
        drafted = [i for i in np.flatnonzero(most > 0).tolist() if self._mirror(int(rows[i]), int(most[i]))]
        ours = np.array([self._mirrored[int(rows[i])][1] for i in drafted], np.int32)
        at = np.array(drafted, np.int64)
        for j in range(int(most.max(initial=0))):
            still = most[at] > j
            at, ours = at[still], ours[still]
            if not len(ours):
                break
            self._run_until_sampled(ours)
            drafts[at, j] = self.states.token_ids[ours, self.states.num_tokens[ours] - 1]
        return drafts

    def _run_until_sampled(self, rows: I32) -> None:
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
            batch = prepare_inputs(states, (todo, n), self.buffers)
            sampling = self.processors.step(step_needs(batch))
            states.commit(batch, self.executor.launch(batch, sampling).result().token_ids)

    def _mirror(self, row: int, drafts: int) -> bool:
        """Update the mirror of a target row, with blocks for its drafts. False if these are not free."""
        target, states = self.target, self.states
        known = int(target.num_tokens[row])
        if row not in self._mirrored and not self._admit(row, known):
            return False
        ours = self._mirrored[row][1]
        states.num_computed_tokens[ours] = min(int(states.num_computed_tokens[ours]), known - 1)
        states.token_ids[ours, :known] = target.token_ids[row, :known]
        states.num_tokens[ours] = known
        states.last_sampled_token[ours] = target.last_sampled_token[row]
        return self.cache.grow_to(np.array([ours], np.int32), np.array([known + drafts]))

    def _admit(self, row: int, known: int) -> bool:
        if row in self.target.extras.prompt_embeds:
            return False
        hit = self.cache.miss(known)
        if self.cache.blocks_to_admit(hit, known) > self.cache.pool.num_free:
            return False
        tokens = self.target.token_ids[row, :known]
        params = replace(self.target.sampling.params.get(row, GREEDY), logprobs=None, prompt_logprobs=None)
        ours, _ = admit(self.states, self.cache, str(row), tokens, hit, known, sampling_params=params)
        self.processors.update()
        self._mirrored[row] = int(self.target.row_generation[row]), ours
        return True

    def _drop_gone(self) -> None:
        for row, (generation, ours) in list(self._mirrored.items()):
            if self.target.row_generation[row] != generation or not self.target.live[row]:
                self.cache.free(ours)
                self.states.remove_request(str(row))
                del self._mirrored[row]
