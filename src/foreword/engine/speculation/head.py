"""Drafts from the model's own head for further tokens: see `foreword.models.next_token`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreword.arrays import F32, I32, I64, Bools
from foreword.batch import InputBatch, InputBuffers, KVGroup, RequestStates, SamplingParams, prepare_inputs, step_needs
from foreword.cache import KVCacheManager
from foreword.engine.speculation.gone_rows import GoneRows
from foreword.executors.functions import rms_norm
from foreword.executors.host import PagedExecutor
from foreword.executors.inputs import StepInputs
from foreword.models.next_token import NextTokenHead
from foreword.models.quants import dequantize
from foreword.sampling import Processors
from foreword.scheduler import admit

GREEDY = SamplingParams(temperature=0.0)


class HeadDrafter:
    """Follows the steps of the target: its layer computes the positions that the target has computed, from their
    hidden states, and its most likely token is the first draft. Further drafts come from its own hidden states.

    Its keys and values are in a cache of its own. Where it begins to follow a request behind a hit, or again after
    its drafts were not wanted, it sees what comes from there on, with positions from 0. Prompts with embeddings, and
    requests for which its cache has no room, get no drafts.

    Position q of a row here is position p = first + q of the target's row; the token there is t[p + 1].
    """

    def __init__(
        self,
        target: RequestStates,
        model: PagedExecutor,
        head: NextTokenHead,
        executor: PagedExecutor,
        *,
        kv_groups: Sequence[KVGroup],
        num_blocks: int,
        max_num_batched_tokens: int,
        relative_cost: float,
    ) -> None:
        """Draft for the rows of ``target``, whose ``model`` runs it; ``executor`` runs the layer of the head."""
        self.target, self.relative_cost, self._model, self._executor = target, relative_cost, model, executor
        self._gone = GoneRows(target)
        self.states = RequestStates(
            max_num_reqs=target.max_num_reqs,
            max_model_len=target.max_model_len,
            vocab_size=target.vocab_size,
            kv_groups=list(kv_groups),
        )
        self.cache = KVCacheManager(self.states, num_blocks, prefix_caching=False)
        self.buffers = InputBuffers.for_states(self.states, max_num_batched_tokens)
        self.processors = Processors(self.states)
        spec, embed, num_rows = head.spec, head.weights["embed"], target.max_num_reqs
        self._embed, self._quant = embed.data, embed.quant
        self._scale, self._eps = np.float32(spec.embedding_scale), spec.norm_eps
        self._norms = head.token_norm.dequantize(), head.hidden_norm.dequantize()
        self._projection = head.projection.dequantize()
        # By target row: the generation that was seen, the row here or −1, and the position where it begins.
        self._generation = np.full(num_rows, -1, np.int64)
        self._row = np.full(num_rows, -1, np.int32)
        self._first = np.zeros(num_rows, np.int32)
        # By target row: the draft after its known tokens or −1, and the hidden state that it came from.
        self._next = np.full(num_rows, -1, np.int32)
        self._hidden = np.zeros((num_rows, spec.hidden_size), np.float32)

    def follow(self, batch: InputBatch, sampled: I32, wanted: Bools) -> None:
        """Compute what a committed step of the target has computed, of the requests that are wanted. sampled: its
        tokens, [B] or [B, D + 1].
        """
        target, states = self.target, self.states
        self._drop(self._gone.take())
        is_wanted = bool(wanted.any())
        if not is_wanted and not len(states):
            return
        rows = batch.idx_mapping.astype(np.int64)
        self._next[rows] = -1
        resting = rows[~wanted & (self._row[rows] >= 0)]
        if resting.size:
            self._drop(resting.tolist())
            self._generation[resting] = -1
        if not is_wanted:
            return
        self._admit(batch, rows, wanted)
        here = wanted & (target.row_generation[rows] == batch.row_generation)
        at = np.flatnonzero(here & (self._row[rows] >= 0))
        if not at.size:
            return
        rows, computed = rows[at], batch.num_computed_tokens[at]
        accepted = np.maximum((sampled.reshape(len(sampled), -1)[at] >= 0).sum(1, dtype=np.int32) - 1, 0)
        n = batch.num_scheduled_tokens[at] - batch.num_draft_tokens[at] + accepted
        mine, start = self._row[rows], computed - self._first[rows]
        if not self.cache.grow_to(mine, start + n):
            self._drop(rows.tolist())
            return
        owner = np.repeat(np.arange(len(rows)), n)
        within = np.arange(len(owner)) - (np.cumsum(n) - n)[owner]
        ids = target.token_ids[rows[owner], computed[owner] + within + 1]
        states.token_ids[mine[owner], start[owner] + within] = ids
        states.num_tokens[mine], states.num_computed_tokens[mine] = start + n, start
        hidden = self._model.hidden_states(batch.query_start_loc[at].astype(np.int64)[owner] + within)
        drafts = self._run(rows, n, ids, hidden)
        self._next[rows] = np.where(computed + n + 1 == target.num_tokens[rows], drafts, -1)

    def propose(self, rows: I32, most: I32) -> I32:
        drafts = np.full((len(rows), self.target.max_num_draft_tokens), -1, np.int32)
        at = np.flatnonzero((most > 0) & (self._next[rows] >= 0))
        drafts[at, 0] = self._next[rows[at]]
        for j in range(1, int(most.max(initial=0))):
            at = at[most[at] > j]
            own = rows[at].astype(np.int64)
            if not at.size or not self.cache.grow_to(self._row[own], self.states.num_tokens[self._row[own]]):
                break
            drafts[at, j] = self._run(own, np.ones(len(at), np.int32), drafts[at, j - 1], self._hidden[own])
        return drafts

    def _run(self, rows: I64, n: I32, ids: I32, hidden: F32) -> I32:
        """Compute n[i] tokens of target rows, from the tokens after them and hidden states. Return one more each."""
        tokens = rms_norm(dequantize(self._embed[ids], self._quant).reshape(len(ids), -1) * self._scale, self._eps)
        both = tokens * self._norms[0], rms_norm(hidden, self._eps) * self._norms[1]
        inputs = np.concatenate(both, axis=1) @ self._projection.T
        self._executor.given = StepInputs((np.arange(len(ids)), inputs))
        batch = prepare_inputs(
            self.states, (self._row[rows], n), self.buffers, gather_block_tables=self._executor.reads_gathered_tables
        )
        sampled = self._executor.launch(batch, self.processors.step(step_needs(batch))).result().token_ids
        self._hidden[rows] = self._executor.hidden_states(batch.query_start_loc[1:].astype(np.int64) - 1)
        self.states.commit(batch, sampled)
        return sampled.reshape(len(rows), -1)[:, 0]

    def _admit(self, batch: InputBatch, rows: I64, wanted: Bools) -> None:
        """Add rows for the requests that are new in a step."""
        is_new = wanted & (self._generation[rows] != batch.row_generation) & (batch.row_generation >= 0)
        for b in np.flatnonzero(is_new).tolist():
            row = int(rows[b])
            self._generation[row] = batch.row_generation[b]
            hit = self.cache.miss(1)
            if row in self.target.extras.prompt_embeds or self.cache.blocks_to_admit(hit, 1) > self.cache.pool.num_free:
                continue
            token = np.zeros(1, np.int32)
            self._row[row], _ = admit(self.states, self.cache, str(row), token, hit, 1, sampling_params=GREEDY)
            self._first[row] = batch.num_computed_tokens[b]
        if is_new.any():
            self.processors.update()

    def _drop(self, rows: Iterable[int]) -> None:
        """Remove the rows here of these target rows, where there are some."""
        for row in rows:
            if self._row[row] >= 0:
                self.cache.free(int(self._row[row]))
                self.states.remove_request(str(row))
                self._row[row] = self._next[row] = -1
