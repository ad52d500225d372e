"""The scheduler: which requests compute how many tokens in the next step, and with which blocks.

    running first, in the order of admission        need = known + drafts − computed, at most what the budget leaves
    short of blocks?  preempt the policy's last     it waits again with all its tokens, and no request is admitted
    then the waiting, in the policy's order         the first one that does not fit stops admission, also one whose next
                                                    prompt block a running request computes: it waits for a longer hit

Prefill and decode are not distinguished: a prompt chunk, a decode token and a verification are all "tokens not computed
yet". A step without arrivals and departures is a few array operations, however many requests run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from foreword.arrays import I32
from foreword.batch import BlockOps, RequestStates
from foreword.cache import KVCacheManager, PrefixHit
from foreword.errors import ConfigError, RequestError
from foreword.scheduler.admission import admit
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.ledger import Ledger, Reason, reason
from foreword.scheduler.plan import NO_BLOCK_OPS, StepPlan
from foreword.scheduler.policies import POLICIES
from foreword.scheduler.request import NO_TOKENS, Request
from foreword.scheduler.shared_prompts import SharedPrompts
from foreword.scheduler.waiting import WaitingQueue


class Scheduler:
    """Plans steps over the rows of ``states`` and the blocks of ``cache``. Only the scheduler adds and removes rows."""

    def __init__(self, states: RequestStates, cache: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        self.config = config = config or SchedulerConfig(max_num_seqs=states.max_num_reqs)
        if config.max_num_seqs > states.max_num_reqs:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs}: the states have {states.max_num_reqs} rows; lower it to that"
            )
        if not config.chunked_prefill and config.max_num_batched_tokens < states.max_model_len:
            raise ConfigError(
                f"chunked_prefill=False with max_num_batched_tokens={config.max_num_batched_tokens}: the longest "
                f"prompt has {states.max_model_len} tokens; raise it to that, or allow chunks"
            )
        if states.max_num_draft_tokens and any(t.group.recurrent for t in states.block_tables):
            raise ConfigError(
                f"max_num_draft_tokens={states.max_num_draft_tokens} with a recurrent KV group: its state after "
                "rejected drafts cannot be restored; serve this model without speculation"
            )
        check_pool(cache, states.max_model_len, config.max_num_batched_tokens + states.max_num_draft_tokens)
        self.states, self.cache = states, cache
        self.waiting = WaitingQueue(POLICIES[config.policy])
        self._policy = POLICIES[config.policy]
        self._rows = np.zeros(0, np.int32)  # running, in the order of admission
        self.max_len = np.zeros(states.max_num_reqs, np.int32)  # by row: known tokens at which the request ends
        self._by_row: list[Request | None] = [None] * states.max_num_reqs
        self._drafts = np.full((states.max_num_reqs, states.max_num_draft_tokens), -1, np.int32)
        self._num_drafts = np.zeros(states.max_num_reqs, np.int32)
        self._may_verify = False  # whether a running row may have drafts
        self._leaves = np.zeros(states.max_num_reqs, np.bool_)  # by row: false, but during `_drop`
        self._num_in_flight = np.zeros(states.max_num_reqs, np.int32)  # by row: tokens of the step in flight
        self._spans_end = np.zeros(states.max_num_reqs, np.int32)  # by row: the end of the last span
        self._has_spans = False  # whether any request has had spans
        self._watermark = int(config.watermark * cache.pool.num_blocks)
        self._hits: dict[str, tuple[int, PrefixHit]] = {}  # request id → version of the cache and its hit there
        self._shared_prompts = SharedPrompts(cache, is_used=not config.long_prefill_threshold)
        self._last_scheduled = NO_TOKENS
        self._decodes: StepPlan | None = None  # the last plan that is one token of the output of each running row
        self._num_repeats = 0  # the steps from now on that it is the plan of, if its rows stay
        self._may_prefill = False  # whether a running row may still compute its prompt
        self.ledger = Ledger(0, config.max_num_batched_tokens, 0, 0, cache.pool.num_free)

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def running(self) -> I32:
        """The rows of the running requests, in the order of admission."""
        return self._rows

    @property
    def has_work(self) -> bool:
        return bool(len(self._rows) or len(self.waiting))

    def request_in(self, row: int) -> Request:
        """The request in a live row."""
        request = self._by_row[row]
        assert request is not None, f"row {row} holds no request"
        return request

    def add(self, request: Request) -> None:
        """Queue a request. RequestError for an id that is waiting or running already."""
        if request.request_id in self.waiting or request.request_id in self.states:
            raise RequestError(
                request.request_id,
                "request_id",
                request.request_id,
                "is in use",
                "Use another id, or abort that request.",
            )
        self.waiting.push(request)
        self._num_repeats = 0

    def remove(self, request_id: str) -> Request | None:
        """Remove a waiting or running request, at any time between two steps. None for an unknown id."""
        self._hits.pop(request_id, None)
        if request_id in self.states:
            request = self.request_in(self.states.row_of(request_id))
            self.finish(np.array([request.row], np.int32))
            return request
        return self.waiting.remove(request_id)

    def finish(self, rows: I32) -> None:
        """Free these running rows. Each request keeps its tokens in ``output``."""
        self._drop(rows)
        for row in rows.tolist():
            self._leave(row)

    def propose(self, rows: I32, drafts: I32) -> None:
        """Drafts for the next step, [n, ≤ D] padded with −1: they follow the last known token of these rows."""
        self._drafts[rows] = -1
        self._drafts[rows, : drafts.shape[1]] = drafts
        self._num_drafts[rows] = (drafts >= 0).sum(1)
        self._may_verify = True
        self._num_repeats = 0

    def reserve_draft_slots(self, rows: I32, draft_slots: I32) -> None:
        """Plan for draft_slots[i] drafts after the tokens in flight of rows[i]; `resolve` fills in their ids."""
        self.propose(rows, np.where(np.arange(self._drafts.shape[1]) < draft_slots[:, None], 0, -1).astype(np.int32))

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Update a plan that was made during a step in flight, after the commit of that step.

        Requests that have ended are left out. Reserved draft slots get the drafts proposed since, as far as there are
        any. Returns the plan itself if nothing changes.
        """
        if plan.draft_tokens is None and plan.rows is self._rows:
            return plan
        live, drafts = self.states.live[plan.rows], None
        if plan.draft_tokens is None and live.all():
            return plan
        rows, n = plan.rows[live], plan.num_scheduled[live]
        if plan.draft_tokens is not None:
            slots = (plan.draft_tokens[live] >= 0).sum(1, dtype=np.int32)
            kept = np.minimum(slots, self._num_drafts[rows])
            n = n - (slots - kept)
            if kept.any():
                drafts = np.where(np.arange(self._drafts.shape[1]) < kept[:, None], self._drafts[rows], np.int32(-1))
        return replace(
            plan,
            rows=rows,
            num_scheduled=n,
            draft_tokens=drafts,
            prefilling=plan.prefilling[self.states.live[plan.prefilling]],
            ledger=replace(plan.ledger, num_tokens=int(n.sum())),
        )

    # -- the step ------------------------------------------------------------------------------------------------

    def schedule(self, in_flight: StepPlan | None = None) -> StepPlan:
        """Plan the next step and allocate the blocks it writes. The plan is empty when no request can run.

        in_flight: a step that is counted as done (`foreword.batch.advance`) but not committed. A request that is
        certain to end with its samples is left out. If blocks are short, the plan is empty: commit that step first.
        """
        last = self._decodes
        if self._num_repeats and last is not None and last.rows is self._rows and in_flight is None:
            self._num_repeats -= 1
            return last
        rows, computed, n, num_tokens, preempted = self._run(in_flight)
        prefilling = NO_TOKENS
        if self._may_prefill:
            prefilling = rows[computed < self.states.prefill_len.take(rows)]
            self._may_prefill = len(prefilling) > 0 or len(rows) < len(self._rows)
        copies: list[I32] = []
        admitted: dict[Request, int] = {}  # and how many tokens each computes
        head, blocked = self._admit(self.config.max_num_batched_tokens - num_tokens, preempted, admitted, copies)
        running, reached = rows, computed
        if admitted:
            counts = np.array(list(admitted.values()), np.int32)
            new = self._rows[-len(counts) :]
            rows, n, prefilling = (np.concatenate(both) for both in ((rows, new), (n, counts), (prefilling, new)))
            computed = self.states.num_computed_tokens.take(rows)
            num_tokens += sum(admitted.values())
        if self.config.long_prefill_threshold and len(rows) == 1:
            n = self._use_rest(rows, computed, n)
            num_tokens = int(n[0])
        if self.cache.keeps_states:
            copies.append(self.cache.keep_states(running, reached))
        self._last_scheduled = rows
        self.ledger = Ledger(
            num_tokens=num_tokens,
            token_budget=self.config.max_num_batched_tokens,
            num_running=len(self._rows),
            num_waiting=len(self.waiting),
            num_free_blocks=self.cache.pool.num_free,
            head=head,
            blocked=blocked,
        )
        plan = StepPlan(
            rows=rows,
            num_scheduled=n,
            draft_tokens=self._scheduled_drafts(rows, computed, n),
            prefilling=prefilling,
            block_ops=BlockOps(NO_TOKENS, np.concatenate(copies)) if any(map(len, copies)) else NO_BLOCK_OPS,
            admitted=tuple(admitted),
            preempted=tuple(preempted or ()),
            ledger=self.ledger,
        )
        # In a step of decodes alone every row computes one token, as in the next step, until a row needs a block.
        decodes = rows is self._rows and num_tokens == len(rows) and not self._may_prefill and not self._may_verify
        if decodes and in_flight is None and head is None and not preempted and plan.block_ops is NO_BLOCK_OPS:
            self._decodes, self._num_repeats = plan, self.cache.num_free_slots(rows, computed + n)
        else:
            self._decodes, self._num_repeats = None, 0
        return plan

    def commit(self, plan: StepPlan) -> None:
        """After `RequestStates.commit`: the prompt tokens that the step computed can be hit from now on."""
        for request in plan.admitted:
            request.has_run = True
        for row in plan.prefilling.tolist():
            if self._by_row[row] is not None:
                self.cache.publish(row)
                self._shared_prompts.follow(row)
        if self.cache.keeps_states:
            self.cache.publish_states()
        if plan.draft_tokens is not None:
            self._num_drafts[plan.rows] = 0

    def free_all(self, requests: Iterable[Request], num_tokens: I32) -> None:
        """After a failure anywhere in a step: no row or block is held, and nothing waits.

        These requests, which may have rows, leave with the first num_tokens[row] tokens; `add` queues them again.
        Blocks that the failed step may have written are not found by lookups.
        """
        for request in requests:
            if request.row >= 0:
                self._keep_output(request, int(num_tokens[request.row]))
        self.cache.free_all()
        self._shared_prompts.clear()
        self.states.remove_rows(np.flatnonzero(self.states.live))
        self._rows = self._last_scheduled = NO_TOKENS
        self._by_row[:] = [None] * len(self._by_row)
        self._num_drafts[:] = self._num_in_flight[:] = 0
        self._hits.clear()
        self.waiting.clear()

    # -- why -----------------------------------------------------------------------------------------------------

    def why(self, request_id: str) -> Reason:
        """The reason why a request waits, or `running`."""
        if request_id in self.states:
            row = self.states.row_of(request_id)
            if row in self._last_scheduled:
                return reason("running")
            need = int(self.states.num_tokens[row] - self.states.num_computed_tokens[row])
            return reason("token_budget", left=0, need=need)
        request = self.waiting.get(request_id)
        return reason("unknown") if request is None else self.ledger.reason_for(request_id, len(request))

    def reasons(self) -> dict[str, Reason]:
        """`why` for every waiting request."""
        return {r.request_id: self.ledger.reason_for(r.request_id, len(r)) for r in self.waiting}

    # -- running -------------------------------------------------------------------------------------------------

    def _run(self, in_flight: StepPlan | None) -> tuple[I32, I32, I32, int, list[Request] | None]:
        """Rows of this step, their computed tokens, tokens to compute and their sum, and the preempted requests.

        None as the last value: a preemption is needed, but a step is in flight.
        """
        preempted: list[Request] = []
        while True:
            rows, computed, n, num_tokens = self._needs(in_flight)
            self._free_expired(rows, computed, in_flight)
            if self.cache.grow_to(rows, computed + n):
                return rows, computed, n, num_tokens, preempted
            if self._num_drafts[rows].any():  # drafts never preempt a request
                self._num_drafts[rows] = 0
                continue
            if in_flight is not None:
                return NO_TOKENS, NO_TOKENS, NO_TOKENS, 0, None
            last = max(self._rows.tolist(), key=lambda row: self._policy(self.request_in(row)))
            preempted.append(self._preempt(last))

    def _needs(self, in_flight: StepPlan | None) -> tuple[I32, I32, I32, int]:
        """The tokens that running rows compute within the budget, and their sum; rows without tokens are left out."""
        rows, states, budget = self._rows, self.states, self.config.max_num_batched_tokens
        computed = states.num_computed_tokens.take(rows)
        n = states.num_tokens.take(rows) - computed
        if self._may_verify:
            drafts = self._num_drafts[rows]
            self._may_verify = bool(drafts.any())
            n += drafts
        if in_flight is not None:
            in_flight_tokens = states.num_placeholders[rows]
            n += in_flight_tokens
            n[states.num_tokens[rows] + (in_flight_tokens > 0) >= self.max_len[rows]] = 0  # drafts may be rejected
        if self.config.long_prefill_threshold:
            n = np.minimum(n, self.config.long_prefill_threshold)
        if self.cache.keeps_states and self.config.chunked_prefill:
            n = self.cache.cut_chunks(rows, computed, n)
        n = self._whole(rows, computed, n, budget)
        total = int(np.add.reduce(n))
        if total > budget:
            before = np.cumsum(n) - n
            n = self._whole(rows, computed, np.clip(budget - before, 0, n).astype(np.int32))
            total = int(np.add.reduce(n))
        if np.count_nonzero(n) < len(n):
            some = np.flatnonzero(n > 0)
            rows, computed, n = rows[some], computed[some], n[some]
        return rows, computed, n, total

    def _whole(self, rows: I32, computed: I32, n: I32, most: int = 0) -> I32:
        """n[i] tokens after computed[i], without parts of spans: see `Request.whole`."""
        if not self._has_spans:
            return n
        ahead = np.flatnonzero((n > 0) & (self._spans_end[rows] > computed))
        if ahead.size:
            n = n.copy()
            for i in ahead.tolist():  # requests with images that are not computed
                n[i] = self.request_in(int(rows[i])).whole(int(computed[i]), int(n[i]), most)
        return n

    def _use_rest(self, rows: I32, computed: I32, n: I32) -> I32:
        """The tokens of the only request of a step, beyond the long-prefill threshold: no other can use the budget."""
        states = self.states
        need = states.num_tokens[rows] + states.num_placeholders[rows] - computed
        budget = self.config.max_num_batched_tokens
        more = np.maximum(n, np.minimum(need, budget))
        if self.cache.keeps_states and self.config.chunked_prefill:
            more = self.cache.cut_chunks(rows, computed, more)
        more = self._whole(rows, computed, more, budget)
        return more if self.cache.grow_to(rows, computed + more) else n

    def _free_expired(self, rows: I32, computed: I32, in_flight: StepPlan | None) -> None:
        """Free blocks below the windows that no step in flight reads."""
        if in_flight is None:
            self.cache.free_expired(rows, computed)
            return
        self._num_in_flight[in_flight.rows] = in_flight.num_scheduled
        self.cache.free_expired(rows, computed - self._num_in_flight[rows])
        self._num_in_flight[in_flight.rows] = 0

    def _preempt(self, row: int) -> Request:
        self._rows = self._rows[self._rows != row]
        request = self._leave(row)
        request.num_preemptions += 1
        self.waiting.push(request)
        return request

    def _drop(self, rows: I32) -> None:
        """Remove these rows from the running ones."""
        if len(rows) == 1:
            self._rows = self._rows[self._rows != rows]
            return
        self._leaves[rows] = True
        self._rows = self._rows[~self._leaves[self._rows]]
        self._leaves[rows] = False

    def _leave(self, row: int) -> Request:
        request = self.request_in(row)
        self._keep_output(request, int(self.states.num_tokens[row]))
        self._shared_prompts.forget(row)
        self.cache.free(row, publish=request.has_run)  # else its block copies may not have been made
        self.states.remove_request(request.request_id)
        self._by_row[row] = None
        self._num_drafts[row] = 0
        return request

    def _keep_output(self, request: Request, num_tokens: int) -> None:
        """The request leaves its row with this many tokens."""
        request.output = self.states.token_ids[request.row, len(request.prompt) : num_tokens].copy()
        request.row = -1

    def _scheduled_drafts(self, rows: I32, computed: I32, n: I32) -> I32 | None:
        """The drafts that fit into the tokens of each row, [B, D], or None. Prompt chunks verify nothing."""
        if not self._may_verify or not self._num_drafts[rows].any():
            return None
        known = self.states.num_tokens[rows] + self.states.num_placeholders[rows]
        fit = np.maximum(n - (known - computed), 0)
        drafts = self._drafts[rows]
        return np.where(np.arange(drafts.shape[1]) < fit[:, None], drafts, -1).astype(np.int32)

    # -- waiting -------------------------------------------------------------------------------------------------

    def _admit(
        self,
        left: int,
        preempted: list[Request] | None,
        admitted: dict[Request, int],
        copies: list[I32],
    ) -> tuple[str | None, Reason | None]:
        """Admit requests in order until one does not fit. Returns its id and the reason."""
        while len(self.waiting):
            request = self.waiting.peek()
            fit = reason("preemption") if preempted is None or preempted else self._fit(request, left)
            if isinstance(fit, Reason):
                return request.request_id, fit
            self.waiting.pop()
            copies.append(self._place(request, *fit))
            admitted[request] = fit[1]
            left -= fit[1]
        return None, None

    def _fit(self, request: Request, left: int) -> tuple[PrefixHit, int] | Reason:
        """The hit to admit a waiting request with and the tokens to compute, at most ``left``; or why not."""
        config, states, running = self.config, self.states, len(self._rows)
        if running >= config.max_num_seqs or len(states) >= states.max_num_reqs:
            return reason("max_num_seqs", running=running, limit=config.max_num_seqs)
        if left < 1:
            return reason("token_budget", left=left, need=len(request))
        hit = self._lookup(request)
        row = self._shared_prompts.computing(hit, request.keys)
        if row >= 0:
            return reason("prompt_of", request=self.request_in(row).request_id)
        n = need = len(request) - hit.num_tokens
        if config.long_prefill_threshold:
            n = request.whole(hit.num_tokens, min(n, config.long_prefill_threshold), need)
        if n > left and not config.chunked_prefill:
            return reason("token_budget", left=left, need=need)
        n = request.whole(hit.num_tokens, min(n, left), left)
        if n < 1:
            return reason("token_budget", left=left, need=need)
        most = min(left, len(request)) if len(request.spans) else n  # a smaller hit may be followed by a longer span
        fitting = self._fitting_hit(hit, most)
        if isinstance(fitting, Reason):
            return fitting
        n = request.whole(fitting.num_tokens, min(n, len(request) - fitting.num_tokens), left)
        if n < 1:
            return reason("token_budget", left=left, need=need)
        return fitting, request.whole(fitting.num_tokens, fitting.cut(n), n) if config.chunked_prefill else n

    def _fitting_hit(self, hit: PrefixHit, n: int) -> PrefixHit | Reason:
        """The hit to use for a request that computes n tokens; the reason if there are too few blocks.

        A copy needs its source block too, and a hit in a window more blocks than the window. When the pool is nearly
        full, fall back to a smaller hit.
        """
        free = self.cache.pool.num_free
        if len(self._rows):
            free -= self._watermark
            if self._may_prefill and self.config.reserve_full_prompt:
                free -= self.cache.blocks_reserved(self._rows)
        tokens = hit.prompt_len if self.config.reserve_full_prompt else min(hit.num_tokens + n, hit.prompt_len)
        need = self.cache.blocks_to_admit(hit, tokens, chunk=n)
        if need <= free:
            return hit
        smaller = (hit.without_partial(), self.cache.miss(hit.prompt_len, hit.num_known)) if hit.num_tokens else ()
        for less in smaller:
            if less is not hit and self.cache.blocks_to_admit(less, tokens, chunk=n) <= free:
                return less
        return reason("no_blocks", need=need, free=max(free, 0))

    def _place(self, request: Request, hit: PrefixHit, n: int) -> I32:
        """Give the request a row, with blocks for the hit and n more tokens. Returns the block copies."""
        self._hits.pop(request.request_id, None)
        request.has_run = False
        if not request.hit_report:
            request.hit_report, request.num_cached = str(hit), hit.num_tokens
        request.row, copies = admit(
            self.states,
            self.cache,
            request.request_id,
            request.prompt,
            hit,
            hit.num_tokens + n,
            request.keys,
            output_token_ids=request.output,
            sampling_params=None if request.pooling_params else request.params,
            lora_id=request.lora_id,
            pooling_params=request.pooling_params,
            **request.inputs,
        )
        self._rows = np.concatenate((self._rows, np.array([request.row], np.int32)))
        self._may_prefill = True
        self._by_row[request.row] = request
        self.max_len[request.row] = request.max_len
        if len(request.spans):
            self._has_spans = True
        self._spans_end[request.row] = request.spans[-1, 1] if len(request.spans) else 0
        self._shared_prompts.follow(request.row, hit)
        return copies

    def _lookup(self, request: Request) -> PrefixHit:
        known = self._hits.get(request.request_id)
        if known is None or known[0] != self.cache.version:
            tokens = request.tokens()
            hit = self.cache.lookup(tokens, request.keys) if request.reuse_prefix else self.cache.miss(len(tokens))
            known = self._hits[request.request_id] = self.cache.version, hit
        return known[1]


def check_pool(cache: KVCacheManager, max_model_len: int, max_new_tokens: int) -> None:
    """ConfigError unless one request of max_model_len tokens fits the pool, with the numbers that would work."""

    def needed(length: int) -> int:
        return 1 + sum(g.most_blocks(length, min(length, max_new_tokens)) for g in cache.groups)

    if needed(max_model_len) <= cache.pool.num_blocks:
        return
    low, high = 0, max_model_len  # needed(low) fits, needed(high) does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= cache.pool.num_blocks else (low, middle)
    raise ConfigError(
        f"num_blocks={cache.pool.num_blocks}: one request of max_model_len={max_model_len} tokens needs "
        f"{needed(max_model_len)}, the null block included; use at least that many, or max_model_len={low}"
    )
