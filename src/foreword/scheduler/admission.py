"""Admit waiting requests: decide how many of their tokens fit into a step, take blocks from the cache, and
add a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreword.arrays import I32
from foreword.batch import CheckedPrompt, NewRequest, RequestStates, TokenIds
from foreword.cache import KVCacheManager, PrefixHit
from foreword.cache.manager import NO_KEYS
from foreword.cache.prefix import BlockKeys
from foreword.scheduler.config import SchedulerConfig
from foreword.scheduler.ledger import Reason, reason
from foreword.scheduler.request import Request
from foreword.scheduler.running import RunningSet
from foreword.scheduler.shared_prompts import SharedPrompts
from foreword.versions import Memo

Fit = tuple[PrefixHit, int]  # the reused prefix of a request, and how many more tokens it computes


def admit(
    states: RequestStates,
    cache: KVCacheManager,
    req_id: str,
    prompt: TokenIds | CheckedPrompt,
    hit: PrefixHit,
    num_tokens: int,
    keys: BlockKeys = NO_KEYS,
    **fields: Any,
) -> tuple[int, I32]:
    """Add a row with blocks for the request's first ``num_tokens`` tokens, the hit's among them. fields: the other
    fields of its `NewRequest`.

    Return the row and the block copies, int32 [C, 2] (from, to), to make before the next forward pass. Raise
    CapacityError if there are too few blocks or rows, and RequestError for an invalid request; then nothing changes.
    """
    blocks = cache.allocate(hit, num_tokens)
    try:
        request = NewRequest(req_id, prompt, blocks.block_ids, num_computed_tokens=hit.num_tokens, **fields)
        row = states.add_request(request)
    except Exception:
        cache.cancel(blocks)
        raise
    cache.attach(row, hit, keys)
    return row, blocks.copies


@dataclass(slots=True)
class Admissions:
    """The requests that a step admits, and the number of tokens that each computes. copies: the block copies of their
    hits.

    head, blocked: the first request that still waits, and the reason; None if none waits.
    """

    requests: list[Request] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    copies: list[I32] = field(default_factory=list)
    head: str | None = None
    blocked: Reason | None = None


class AdmissionControl:
    """Decide whether a waiting request fits into a step, and move it into the running set."""

    def __init__(
        self,
        states: RequestStates,
        cache: KVCacheManager,
        config: SchedulerConfig,
        running: RunningSet,
        shared_prompts: SharedPrompts,
    ) -> None:
        self._states, self._cache, self._config = states, cache, config
        self._running, self._shared_prompts = running, shared_prompts
        self._watermark = int(config.watermark * cache.pool.num_blocks)
        self._hit = Memo[Request, PrefixHit](cache)  # by the waiting request

    def fit(self, request: Request, left: int, most: int) -> Fit | Reason:
        """Return the hit of a waiting request and the number of tokens to compute, at most ``left``, but a first span
        of up to ``most``; or the reason why it does not fit.
        """
        config, states, running = self._config, self._states, len(self._running)
        if running >= config.max_num_seqs or len(states) >= states.max_num_reqs:
            return reason("max_num_seqs", running=running, limit=config.max_num_seqs)
        if left < 1:
            return reason("token_budget", left=left, need=len(request))
        hit = self._lookup(request)
        row = self._shared_prompts.computing(hit, request.keys)
        if row >= 0:
            return reason("prompt_of", request=self._running.request_in(row).request_id)
        n = need = len(request) - hit.num_tokens
        if config.long_prefill_threshold:
            n = request.whole(hit.num_tokens, min(n, config.long_prefill_threshold), need)
        if n > left and not config.chunks_prompts:
            return reason("token_budget", left=left, need=need)
        n = request.whole(hit.num_tokens, min(n, left), most)
        if n < 1:
            return reason("token_budget", left=left, need=need)
        chunk = min(most, len(request)) if len(request.spans) else n  # a smaller hit may be followed by a longer span
        fitting = self._fitting_hit(hit, chunk)
        if isinstance(fitting, Reason):
            return fitting
        n = request.whole(fitting.num_tokens, min(n, len(request) - fitting.num_tokens), most)
        if n < 1:
            return reason("token_budget", left=left, need=need)
        return fitting, request.whole(fitting.num_tokens, fitting.cut(n), n) if config.chunks_prompts else n

    def _fitting_hit(self, hit: PrefixHit, n: int) -> PrefixHit | Reason:
        """Return the hit to use for a request that computes n tokens, or the reason if there are too few blocks or
        state slots.

        A copy also needs its source block, and a hit with a sliding window needs more blocks than the window. When the
        pool is nearly full, fall back to a smaller hit.
        """
        free = self._cache.pool.num_free
        if len(self._running):
            free -= self._watermark
            if self._running.may_prefill and self._config.reserve_full_prompt:
                free -= self._cache.blocks_reserved(self._running.rows)
        tokens = hit.prompt_len if self._config.reserve_full_prompt else min(hit.num_tokens + n, hit.prompt_len)
        need = self._cache.blocks_to_admit(hit, tokens, chunk=n)
        if need <= free and self._has_states(hit):
            return hit
        smaller = (hit.without_partial(), self._cache.miss(hit.prompt_len, hit.num_known)) if hit.num_tokens else ()
        for less in smaller:
            if (
                less is not hit
                and self._cache.blocks_to_admit(less, tokens, chunk=n) <= free
                and self._has_states(less)
            ):
                return less
        if need <= free:
            states = self._cache.states_to_admit(hit)
            return reason("no_states", need=states, free=self._cache.num_free_states(states))
        return reason("no_blocks", need=need, free=max(free, 0))

    def _has_states(self, hit: PrefixHit) -> bool:
        """Return whether the state slots that a hit takes are free."""
        need = self._cache.states_to_admit(hit)
        return not need or need <= self._cache.num_free_states(need)

    def place(self, request: Request, fit: Fit, admissions: Admissions) -> int:
        """Give the request a row with blocks for the tokens that fit, and record it. Return the number of tokens."""
        hit, n = fit
        self._hit.forget()
        request.has_run = False
        if not request.hit_report:
            request.hit_report, request.num_cached = str(hit), hit.num_tokens
            request.cache_miss = self._cache.why_missed(hit, request.tokens(), request.keys)
        request.row, copies = admit(
            self._states,
            self._cache,
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
        self._running.enter(request)
        self._shared_prompts.follow(request.row, hit)
        admissions.requests.append(request)
        admissions.num_scheduled.append(n)
        admissions.copies.append(copies)
        return n

    def _lookup(self, request: Request) -> PrefixHit:
        """Return the longest prefix of a waiting request's tokens that can be reused now."""
        hit = self._hit.find(request)
        if hit is None:
            tokens = request.tokens()
            hit = self._cache.lookup(tokens, request.keys) if request.reuse_prefix else self._cache.miss(len(tokens))
            self._hit.keep(request, hit)
        return hit
