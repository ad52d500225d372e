"""The scheduler: it decides which requests compute how many tokens in the next step, and with which blocks.

    running first, in the order of admission        need = known + drafts − computed, at most what the budget leaves
    short of blocks?  preempt the policy's last     it waits again with all its tokens, and no request is admitted
    then the waiting, in the policy's order         the first one that does not fit stops admission, also one whose next
                                                    prompt block a running request computes: it waits for a longer hit

Prefill and decode are not distinguished: a prompt chunk, a decode token and a verification are all "tokens not computed
yet". A step without arrivals and departures is a few array operations, however many requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from foreword.arrays import I32
from foreword.batch import BlockOps, RequestStates
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError, RequestError
from foreword.scheduler.admission import AdmissionControl, Admissions
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.drafts import Drafts
from foreword.scheduler.ledger import Ledger, Reason, reason
from foreword.scheduler.pace import PromptPace
from foreword.scheduler.plan import StepPlan
from foreword.scheduler.request import NO_TOKENS, Request
from foreword.scheduler.running import NO_SHARE, RunningSet, Share
from foreword.scheduler.shared_prompts import SharedPrompts
from foreword.scheduler.shares import Shares
from foreword.scheduler.waiting import WaitingQueue
from foreword.versions import Memo


class Scheduler:
    """Plan steps over the rows of ``states`` and the blocks of ``cache``. Only the scheduler adds and removes rows.

    running, waiting: its requests. drafts: the drafts that the next step verifies. ledger: the record of the last plan.
    pace: bounds the prompt tokens of a step; `measure` tells it the times of steps.
    """

    def __init__(self, states: RequestStates, cache: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        self.config = config = config or SchedulerConfig(max_num_seqs=states.max_num_reqs)
        if config.max_num_seqs > states.max_num_reqs:
            raise ConfigError(
                f"max_num_seqs={config.max_num_seqs}: the states have {states.max_num_reqs} rows; lower it to that"
            )
        if not config.chunks_prompts and config.max_num_batched_tokens < states.max_model_len:
            raise ConfigError(
                f"chunked_prefill=False with max_num_batched_tokens={config.max_num_batched_tokens}: the longest "
                f"prompt has {states.max_model_len} tokens; raise it to that, or allow chunks"
            )
        check_pool(cache, states.max_model_len, config.max_num_batched_tokens + states.max_num_draft_tokens)
        self.states, self.cache = states, cache
        self._shares = Shares() if config.order.is_fair else None
        self.policy = config.order if self._shares is None else replace(config.order, key=self._shares.key)
        self.waiting = WaitingQueue(self.policy)
        self.running = RunningSet(states)
        self.ledger = Ledger(0, config.max_num_batched_tokens, 0, 0, cache.pool.num_free)
        self.drafts = Drafts(states.max_num_reqs, states.max_num_draft_tokens)
        self.pace = PromptPace(config.bounded_share)
        self._shared_prompts = SharedPrompts(cache, is_used=not config.long_prefill_threshold)
        self._admission = AdmissionControl(states, cache, config, self.running, self._shared_prompts)
        self._last_scheduled = NO_TOKENS
        self._repeated = Memo[I32, StepPlan](self.waiting, self.drafts)  # by the running rows
        self._taken: dict[str, Request] = {}  # out of the queue, by `take_preempted`

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or len(self.waiting))

    def add(self, request: Request) -> None:
        """Queue a request. Raise RequestError if its id is waiting or running already."""
        if request.request_id in self.waiting or request.request_id in self.states:
            raise RequestError(
                request.request_id,
                "request_id",
                request.request_id,
                "is in use",
                "Use another id, or abort that request.",
            )
        self._taken.pop(request.request_id, None)
        self.waiting.push(request)
        if self._shares is not None:
            self._shares.added(request, self.policy.key_of(request)[1])

    def remove(self, request_id: str) -> Request | None:
        """Remove a waiting, taken or running request, at any time between two steps. Return None if unknown."""
        if request_id not in self.states:
            waiting = self.waiting.remove(request_id) or self._taken.pop(request_id, None)
            if waiting is not None and self._shares is not None:
                self._shares.ended(waiting)
            return waiting
        request = self.running.request_in(self.states.row_of(request_id))
        self.finish(np.array([request.row], np.int32))
        return request

    def take_preempted(self, is_wanted: Callable[[Request], bool]) -> None:
        """Take the next request out of the queue if it was preempted, the next step could admit it, and it is wanted,
        which is asked once per preemption. `add` puts it back.
        """
        if not len(self.waiting) or not (request := self.waiting.peek()).was_preempted:
            return
        left = self.config.max_num_batched_tokens - len(self.running)
        if isinstance(self._admission.fit(request, left, left), Reason):
            return
        request.was_preempted = False
        if is_wanted(request):
            self.waiting.remove(request.request_id)
            self._taken[request.request_id] = request

    def finish(self, rows: I32) -> None:
        """Free these running rows. Each request keeps its tokens in ``output``."""
        for request in self.running.leave(rows):
            self._free(request)
            if self._shares is not None:
                self._shares.ended(request)

    def resolve(self, plan: StepPlan) -> StepPlan:
        """Update a plan that was made during a step in flight, after the commit of that step.

        Requests that have ended are left out. Reserved draft slots get the drafts that were proposed since. Return the
        plan itself if nothing changes.
        """
        if plan.draft_tokens is None and (plan.rows is self.running.rows or self.states.live[plan.rows].all()):
            return plan
        live, drafts = self.states.live[plan.rows], None
        rows, n = plan.rows[live], plan.num_scheduled[live]
        if plan.draft_tokens is not None:
            slots = (plan.draft_tokens[live] >= 0).sum(1, dtype=np.int32)
            filled, drafts = self.drafts.filled(rows, slots)
            n = n - (slots - filled)
        return replace(
            plan,
            rows=rows,
            num_scheduled=n,
            draft_tokens=drafts,
            prefilling=plan.prefilling[self.states.live[plan.prefilling]],
            num_prompt_tokens=int(n[np.isin(rows, plan.prefilling)].sum()) if len(plan.prefilling) else 0,
            ledger=replace(plan.ledger, num_tokens=int(n.sum())),
        )

    # -- the step ------------------------------------------------------------------------------------------------

    def schedule(self, in_flight: StepPlan | None = None) -> StepPlan:
        """Plan the next step and allocate the blocks it writes. The plan is empty when no request can run.

        in_flight: a step that is counted as done (`foreword.batch.advance`) but not committed. A request that is
        certain to end with its samples is left out. If blocks are short, the plan is empty: commit that step first.
        """
        if in_flight is None and (plan := self._repeated.find(self.running.rows)) is not None:
            return plan
        ran, preempted = self._continue_running(in_flight)
        prefilling, num_prompt_tokens = self.running.prefilling(ran)
        admissions = self._admit_waiting(ran, num_prompt_tokens, preempted)
        share = self._with_admitted(ran, admissions)
        if self.config.long_prefill_threshold and len(share.rows) == 1:
            share = self._use_rest(share)
        num_prompt_tokens += share.num_tokens - ran.num_tokens
        copies = admissions.copies
        if self.cache.keeps_states:
            copies.append(self.cache.keep_states(ran.rows, ran.computed))
        self._last_scheduled = share.rows
        self.ledger = self._new_ledger(share, admissions)
        plan = StepPlan(
            rows=share.rows,
            num_scheduled=share.num_scheduled,
            draft_tokens=self._scheduled_drafts(share),
            num_prompt_tokens=num_prompt_tokens,
            prefilling=prefilling if share is ran else np.concatenate((prefilling, share.rows[len(ran.rows) :])),
            block_ops=BlockOps(NO_TOKENS, np.concatenate(copies)) if any(map(len, copies)) else BlockOps.NONE,
            admitted=tuple(admissions.requests),
            preempted=tuple(preempted or ()),
            ledger=self.ledger,
        )
        if in_flight is None and self._is_decode_of_all(plan):
            self._repeated.keep(share.rows, plan, uses=self.cache.num_free_slots(share.rows, share.end))
        else:
            self._repeated.forget()
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Publish the prompt tokens that the step computed, so that later requests can reuse them. Call it after
        `RequestStates.commit`.
        """
        for request in plan.admitted:
            request.has_run = True
        for row in plan.prefilling.tolist():
            if self.states.live[row]:
                self.cache.publish(row)
                self._shared_prompts.follow(row)
        if self.cache.keeps_states:
            self.cache.publish_states()
        if self.drafts.may_verify:
            self.drafts.discard(plan.rows)

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the time of a step how many prompt tokens further ones may have."""
        if self.running.has_streamed and self.pace.is_limited:
            self.pace.measure(plan.num_tokens - plan.num_prompt_tokens, plan.num_prompt_tokens, seconds)

    def free_all(self, requests: Iterable[Request], num_tokens: I32) -> None:
        """Free all rows and blocks, and empty the queue, after a failure anywhere in a step.

        These requests, which may have rows, leave with the first num_tokens[row] tokens; `add` queues them again.
        Blocks that the failed step may have written are not found by lookups.
        """
        for request in requests:
            if request.row >= 0:
                self._keep_output(request, int(num_tokens[request.row]))
        self.cache.free_all()
        self._shared_prompts.clear()
        self.states.remove_rows(np.flatnonzero(self.states.live))
        self._last_scheduled = NO_TOKENS
        self.running.clear()
        self.drafts.clear()
        self.waiting.clear()
        self._taken.clear()

    # -- why -----------------------------------------------------------------------------------------------------

    def why(self, request_id: str) -> Reason:
        """Return the reason why a request waits, or `running`."""
        if request_id in self.states:
            row = self.states.row_of(request_id)
            if row in self._last_scheduled:
                return reason("running")
            need = int(self.states.num_tokens[row] - self.states.num_computed_tokens[row])
            return reason("token_budget", left=0, need=need)
        request = self.waiting.get(request_id)
        return reason("unknown") if request is None else self._why_waiting(request)

    def reasons(self) -> dict[str, Reason]:
        """Return `why` for every waiting request."""
        return {request.request_id: self._why_waiting(request) for request in self.waiting}

    def _why_waiting(self, request: Request) -> Reason:
        ahead = 0 if self._shares is None or request.request_id == self.ledger.head else self._shares.ahead(request)
        return reason("share", tokens=ahead) if ahead else self.ledger.reason_for(request.request_id, len(request))

    # -- running -------------------------------------------------------------------------------------------------

    def _continue_running(self, in_flight: StepPlan | None) -> tuple[Share, list[Request] | None]:
        """Return the share of running rows, with blocks for its tokens, and the requests that were preempted to get
        them.

        None in place of the requests, and no share: a preemption is needed, but a step is in flight.
        """
        preempted: list[Request] = []
        while True:
            share = self._needs(in_flight)
            self._free_expired(share, in_flight)
            num_drafts = self._num_drafts(share) if self.drafts.may_verify else None
            if self.cache.grow_to(share.rows, share.end, num_drafts):
                return share, preempted
            if self.drafts.count(share.rows).any():  # drafts never preempt a request
                self.drafts.discard(share.rows)
                continue
            if in_flight is not None:
                return NO_SHARE, None
            preempted.append(self._preempt_last())

    def _needs(self, in_flight: StepPlan | None) -> Share:
        """Return the tokens that running rows compute within the budget; rows without tokens are left out."""
        rows, states, budget = self.running.rows, self.states, self.config.max_num_batched_tokens
        computed = states.num_computed_tokens.take(rows)
        n = states.num_tokens.take(rows) - computed
        if (drafts := self.drafts.count_of_running(rows)) is not None:
            n += drafts
        if in_flight is not None:
            in_flight_tokens = states.num_placeholders[rows]
            n += in_flight_tokens
            ends = states.num_tokens[rows] + (in_flight_tokens > 0) >= self.running.max_len[rows]
            n[ends] = 0  # only one token is certain, because drafts may be rejected
        if self.config.long_prefill_threshold:
            n = np.minimum(n, self.config.long_prefill_threshold)
        if self.running.may_prefill and self.running.has_streamed and self.pace.is_limited:
            n = self._paced(rows, computed, n)
        n = self._cut(rows, computed, n, budget)
        total = int(np.add.reduce(n))
        if total > budget:
            before = np.cumsum(n) - n
            n = self.running.whole(rows, computed, np.clip(budget - before, 0, n).astype(np.int32))
            total = int(np.add.reduce(n))
        if np.count_nonzero(n) < len(n):
            some = np.flatnonzero(n > 0)
            rows, computed, n = rows[some], computed[some], n[some]
        return Share(rows, computed, n, total)

    def _paced(self, rows: I32, computed: I32, n: I32) -> I32:
        """Return n[i], the number of tokens after computed[i], or fewer for prompts while other rows stream."""
        decodes = self.running.streaming(rows, computed, n)
        if decodes is None:
            return n
        of_prompts = np.where(decodes, 0, n)
        left = self.pace.limit(int(n.sum() - of_prompts.sum())) - (np.cumsum(of_prompts) - of_prompts)
        return np.where(decodes, n, np.clip(left, 0, of_prompts)).astype(np.int32)

    def _cut(self, rows: I32, computed: I32, n: I32, most: int) -> I32:
        """Return n[i], the number of tokens after computed[i], or fewer: up to a kept recurrent state, with whole spans
        up to ``most``.
        """
        if self.cache.keeps_states and self.config.chunks_prompts:
            n = self.cache.cut_chunks(rows, computed, n)
        return self.running.whole(rows, computed, n, most)

    def _use_rest(self, share: Share) -> Share:
        """Return the share of the only row of a step, beyond the long-prefill threshold: it can use all the budget."""
        (rows, computed, n, _), states, budget = share, self.states, self.config.max_num_batched_tokens
        need = states.num_tokens[rows] + states.num_placeholders[rows] - computed
        n = self._cut(rows, computed, np.maximum(n, np.minimum(need, budget)), budget)
        return Share(rows, computed, n, int(n[0])) if self.cache.grow_to(rows, computed + n) else share

    def _free_expired(self, share: Share, in_flight: StepPlan | None) -> None:
        """Free blocks below the windows that no step in flight reads."""
        read_from = share.computed
        if in_flight is not None:
            read_from = read_from - self.running.num_in_flight(share.rows, in_flight)
        self.cache.free_expired(share.rows, read_from)

    def _preempt_last(self) -> Request:
        """Move the policy's last running request back to the queue, with all its tokens."""
        last = max(self.running.rows.tolist(), key=lambda row: self.policy.key_of(self.running.request_in(row)))
        (request,) = self.running.leave(np.array([last], np.int32))
        self._free(request)
        request.num_preemptions, request.was_preempted = request.num_preemptions + 1, True
        self.waiting.push(request)
        return request

    def _free(self, request: Request) -> None:
        """Free the row and the blocks of a request that has left the running set."""
        row = request.row
        self._keep_output(request, int(self.states.num_tokens[row]))
        self._shared_prompts.forget(row)
        self.cache.free(row, publish=request.has_run)  # otherwise its block copies may not have been made
        self.states.remove_request(request.request_id)
        self.drafts.discard(row)

    def _keep_output(self, request: Request, num_tokens: int) -> None:
        """Keep this many tokens of a request that leaves its row."""
        request.output = self.states.token_ids[request.row, len(request.prompt) : num_tokens].copy()
        request.row = -1

    def _scheduled_drafts(self, share: Share) -> I32 | None:
        """Return the drafts that fit into the tokens of each row, [B, D], or None. Prompt chunks verify nothing."""
        return self.drafts.fitting(share.rows, self._num_drafts(share)) if self.drafts.may_verify else None

    def _num_drafts(self, share: Share) -> I32:
        """Return the number of tokens of each row's share that follow its known tokens and those in flight."""
        known = self.states.num_tokens[share.rows] + self.states.num_placeholders[share.rows]
        return np.maximum(share.end - known, 0)

    def _new_ledger(self, share: Share, admissions: Admissions) -> Ledger:
        return Ledger(
            num_tokens=share.num_tokens,
            token_budget=self.config.max_num_batched_tokens,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.cache.pool.num_free,
            head=admissions.head,
            blocked=admissions.blocked,
        )

    def _is_decode_of_all(self, plan: StepPlan) -> bool:
        """Return whether a plan is one output token per request: the next is the same until a row needs a block."""
        has_all = plan.rows is self.running.rows and plan.ledger.head is None
        return has_all and plan.num_tokens == len(plan.rows) and not len(plan.prefilling)

    # -- waiting -------------------------------------------------------------------------------------------------

    def _room(self, ran: Share, num_prompt_tokens: int, most: int) -> int:
        """Return how many of ``most`` tokens the admitted requests may compute, beside those of running ones."""
        if not (len(self.waiting) and self.running.has_streamed and self.pace.is_limited):
            return most
        if self.running.streaming(ran.rows, ran.computed, ran.num_scheduled) is None:
            return most
        return min(most, self.pace.limit(ran.num_tokens - num_prompt_tokens) - num_prompt_tokens)

    def _admit_waiting(self, ran: Share, num_prompt_tokens: int, preempted: list[Request] | None) -> Admissions:
        """Admit requests in order until one does not fit beside the running ones, of whose tokens so many are of
        prompts; none if blocks were short.
        """
        admissions, may_admit = Admissions(), preempted == []
        most = self.config.max_num_batched_tokens - ran.num_tokens
        left = self._room(ran, num_prompt_tokens, most)
        while len(self.waiting):
            request = self.waiting.peek()
            fit = self._admission.fit(request, left, most) if may_admit else reason("preemption")
            if isinstance(fit, Reason):
                admissions.head, admissions.blocked = request.request_id, fit
                break
            self.waiting.pop()
            if self._shares is not None:
                self._shares.admitted(request)
            n = self._admission.place(request, fit, admissions)
            left, most = max(left - n, 0), most - n
        return admissions

    def _with_admitted(self, ran: Share, admissions: Admissions) -> Share:
        """Return the share of running rows, followed by that of the admitted ones."""
        count = len(admissions.requests)
        if not count:
            return ran
        rows = np.concatenate((ran.rows, self.running.rows[-count:]))
        n = np.concatenate((ran.num_scheduled, np.array(admissions.num_scheduled, np.int32)))
        total = ran.num_tokens + sum(admissions.num_scheduled)
        return Share(rows, self.states.num_computed_tokens.take(rows), n, total)


def check_pool(cache: KVCacheManager, max_model_len: int, max_new_tokens: int) -> None:
    """Raise ConfigError, with the numbers that would work, unless one request of max_model_len tokens fits
    in the pool, and its states in theirs.
    """
    of_states = [g.most_blocks(1, 1) for g, apart in zip(cache.groups, cache.is_apart, strict=True) if apart]
    of_blocks = [group for group, apart in zip(cache.groups, cache.is_apart, strict=True) if not apart]
    if of_states and sum(of_states) > cache.state_pool.num_blocks:
        raise ConfigError(
            f"num_states={cache.state_pool.num_blocks}: one request needs {sum(of_states)}; use at least that many"
        )

    def needed(length: int) -> int:
        return 1 + sum(g.most_blocks(length, min(length, max_new_tokens)) for g in of_blocks)

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
