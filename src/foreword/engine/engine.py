"""The loop: requests in, steps, outputs out.

    add_request ─▶ Scheduler.schedule ─▶ prepare_inputs ─▶ Executor.execute ─▶ Sampler.sample ─▶ commit ─▶ outputs

A step touches in Python only the requests that come, go, stream, or stop; for the others it is array operations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch import InputBatch, KVGroup, RequestStates
from foreword.batch.values.sampling_params import SamplingParams
from foreword.cache import KVCache, prefix_keys
from foreword.engine.completion import Completion, Job
from foreword.engine.config import EngineConfig
from foreword.engine.outputs import FinishReason, RequestOutput
from foreword.engine.pipeline import Pipeline, Step
from foreword.engine.speculation import Drafter, Speculation
from foreword.engine.text import Detokenizer, TextStream
from foreword.engine.validation import check_id, check_options, checked_params, checked_prompt
from foreword.errors import RequestError
from foreword.executors.executor import Executor
from foreword.sampling import Sampled, Sampler, TokenLogprobs, derived_seed
from foreword.scheduler import Reason, Request, Scheduler, StepPlan
from foreword.scheduler.ledger import reason

Prompt = str | Sequence[int]


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def detokenizer(self, skip_special_tokens: bool = True, *, continues: bool = False) -> Detokenizer: ...


class Engine:
    """Serves requests on one executor. Not thread-safe: one thread adds, steps and aborts.

    states, cache, scheduler and sampler are its parts, for those who want to look.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        max_model_len: int,
        kv_groups: Sequence[KVGroup],
        num_blocks: int,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
        drafter: Callable[[RequestStates], Drafter] | None = None,
        on_step: Callable[[StepPlan, InputBatch], None] | None = None,
    ) -> None:
        """num_blocks: the executor's pool. drafter: makes what proposes drafts, in place of the configured method.
        on_step: called with every step before it runs, for those who watch.
        """
        self.config = config = config or EngineConfig()
        self.executor = executor
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock
        self.states = RequestStates(
            max_num_reqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            kv_groups=list(kv_groups),
            max_num_draft_tokens=config.speculation.num_tokens if config.speculation else 0,
        )
        self.speculation = Speculation(self.states, config.speculation, drafter) if config.speculation else None
        self.cache = KVCache(
            self.states,
            num_blocks,
            prefix_caching=config.prefix_caching,
            partial_reuse=config.partial_reuse,
        )
        self.scheduler = Scheduler(self.states, self.cache, config.scheduler_config())
        self.sampler = Sampler(self.states, threads=executor.compute_threads)
        self.pipeline = Pipeline(
            self.states,
            executor,
            self.sampler,
            max_num_batched_tokens=config.max_num_batched_tokens,
            depth=2 if config.async_scheduling else 1,
            check=config.check,
        )
        self.on_step = on_step
        self._jobs: dict[str, Job] = {}
        self._completions: dict[str, Completion] = {}  # by the scheduler's request id
        self._arrivals = 0
        self._seed = config.seed if config.seed is not None else int.from_bytes(os.urandom(7), "little")
        rows = config.max_num_seqs
        self._planned: Step | None = None  # beside the last one, and not settled yet
        self._ready: list[RequestOutput] = []  # for the next return of `step`, whatever fails before it
        # By row, the known tokens from which on its new tokens are looked at: 0 for all of them (streams, stop strings,
        # log-probabilities), else its length limit.
        self._read_from = np.zeros(rows, np.int32)
        self._is_end = np.zeros(vocab_size, np.bool_)  # token ids that may end some request

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._jobs) or bool(self._ready)

    @property
    def num_unfinished(self) -> int:
        return len(self._jobs)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_id: int = 0,
        cache_salt: str | None = None,
        stream: bool = False,
    ) -> None:
        """Let a request in. RequestError if it cannot be served as given; then nothing has changed.

        stream: report it in every step that brings new tokens, not only at its end. With best_of above n it is
        reported at its end alone: which candidates stay is known only then.
        cache_salt: its prefix is shared with equal salts only.
        """
        job = self.check(request_id, prompt, params, stream=stream)
        self.add(job, priority=priority, lora_id=lora_id, cache_salt=cache_salt)

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        prompt_text: str | None = None,
    ) -> Job:
        """What `add_request` would let in, without letting it in. RequestError as there.

        prompt_text: what token ids were made from, for the output.
        """
        check_id(request_id)
        if request_id in self._jobs:
            raise RequestError(request_id, "request_id", request_id, "is here already", "Use another id.")
        if isinstance(prompt, str):
            prompt_text, prompt = prompt, self._encode(request_id, prompt)
        vocab_size = self.states.vocab_size
        tokens = checked_prompt(request_id, prompt, vocab_size=vocab_size, max_model_len=self.states.max_model_len)
        params = SamplingParams() if params is None else checked_params(request_id, params, vocab_size=vocab_size)
        if (params.stop_strings or params.bad_words) and self.tokenizer is None:
            raise RequestError(request_id, "stop", params.stop, "needs a tokenizer", "Use stop_token_ids.")
        if words := self._bad_words(params):
            params = replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *words))
        stream = stream and (params.best_of or params.n) == params.n
        return Job(request_id, prompt_text, tokens.tolist(), params, stream, self.clock())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once, with what it has. None for an unknown id (so aborting twice is harmless)."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        self._ready = [output for output in self._ready if output.request_id != request_id]
        job.followers = []
        for completion in job.completions:
            if completion.finish_reason is None:
                row = completion.request.row
                self.scheduler.remove(completion.request.request_id)
                if row >= 0:
                    self._forget_row(row)
                self._finish(completion, completion.request.output.tolist(), "abort", None)
        return job.final()

    def why(self, request_id: str) -> Reason:
        """The one reason a request waits, or that it runs."""
        job = self._jobs.get(request_id)
        if job is None:
            return reason("unknown")
        first = next(c for c in job.completions if c.finish_reason is None)
        if first in job.followers:
            return reason("prompt_of", request=request_id)
        return self.scheduler.why(first.request.request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changes, while requests hold blocks."""
        return self.cache.reset()

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that ended, and the streaming ones that have new tokens."""
        if self.config.async_scheduling:
            self._step_beside()
        elif (step := self._plan()) is not None:
            self._ready += self._run(step)
        outputs, self._ready = self._ready, []
        return outputs

    def _step_beside(self) -> None:
        """Run a step, and plan the one after it meanwhile."""
        step = self._take_planned() or self._plan()
        if step is None:
            return
        try:
            if self.on_step is not None:
                self.on_step(step.plan, step.batch)
            self.states.advance(step.batch)
        except BaseException:
            self._cancel(step)
            raise
        planning = self.pipeline.beside(partial(self._plan, step.plan))
        try:
            sampled = self.pipeline.run(step)
            planning.wait()
        except BaseException:
            planning.wait()  # nothing changes under it, whatever interrupted the run
            self._cancel(step)
            if (ahead := planning.result()) is not None:
                self._cancel(ahead)
            raise
        self._ready += self._commit(step, sampled)
        self._planned = planning.result()

    def _take_planned(self) -> Step | None:
        """The step that was planned beside the last one, brought to the truth; None if nobody is left of it."""
        step, self._planned = self._planned, None
        if step is None:
            return None
        try:
            plan = self.scheduler.settle(step.plan)
            if not len(plan.rows):
                self.pipeline.drop(step)
                return None
            self.pipeline.settle(step, plan)
        except BaseException:
            self._cancel(step)
            raise
        return step

    def close(self) -> None:
        """End the helper's thread. The engine can be used again."""
        self.pipeline.close()

    def _plan(self, in_flight: StepPlan | None = None) -> Step | None:
        """The next step, planned and prepared; None if nothing can be done now."""
        if in_flight is not None and self.speculation is not None:
            self._keep_places(in_flight, self.speculation)
        plan = self.scheduler.schedule(in_flight)
        self._welcome(plan)
        return self.pipeline.prepare(plan) if len(plan.rows) else None

    def _run(self, step: Step) -> list[RequestOutput]:
        """Run a step here and now."""
        try:
            if self.on_step is not None:
                self.on_step(step.plan, step.batch)
            sampled = self.pipeline.run(step)
        except BaseException:
            self._cancel(step)
            raise
        return self._commit(step, sampled)

    def _cancel(self, step: Step) -> None:
        """A step failed. Its requests wait again as if it had never been planned, and the engine can go on."""
        self.pipeline.release(step)
        for row in self.scheduler.cancel(step.plan).tolist():
            self._forget_row(row)

    def _commit(self, step: Step, sampled: Sampled) -> list[RequestOutput]:
        plan, rows, states = step.plan, step.plan.rows, self.states
        # A decode step adds a token to each of its rows.
        decoded = not len(plan.prefilling) and plan.draft_tokens is None
        before = None if decoded else states.num_tokens.take(rows)
        states.commit(step.batch, sampled.token_ids)
        self.pipeline.release(step)
        self.scheduler.commit(plan)
        for row, found in step.prompt_logprobs.items():
            self._completions[self.scheduler.request_in(row).request_id].job.add_prompt_logprobs(found)
        known, tokens = states.num_tokens.take(rows), sampled.token_ids
        look = known >= self._read_from.take(rows)
        if tokens.ndim == 1:
            look |= self._is_end.take(tokens)
        else:
            look |= (self._is_end[tokens] & (tokens >= 0)).any(1)
        if before is not None:
            look &= known > before
        at = look.nonzero()[0]
        outputs = self._read(rows, at, sampled) if at.size else []
        if self.speculation is not None:
            self.speculation.learn(plan, tokens)
            grown = rows if before is None else rows[known > before]
            self._speculate(grown[states.live[grown]])
        return outputs

    def _keep_places(self, in_flight: StepPlan, speculation: Speculation) -> None:
        """Plan for as many drafts as may be proposed once the samples of the step in flight are known."""
        states = self.states
        rows = in_flight.rows[states.num_placeholders[in_flight.rows] > 0]
        room = self.scheduler.max_len[rows] - states.num_tokens[rows] - states.num_placeholders[rows] - 1
        self.scheduler.reserve(rows, speculation.places(rows, room))

    def _speculate(self, rows: I32) -> None:
        """Propose drafts for the rows that go on; a row may not outgrow its limit."""
        if self.speculation is None or not len(rows):
            return
        room = self.scheduler.max_len[rows] - self.states.num_tokens[rows] - 1
        self.scheduler.propose(rows, self.speculation.propose(rows, room))

    def _read(self, rows: I32, at: I64, sampled: Sampled) -> list[RequestOutput]:
        """Look at the new tokens of some requests: stops, text, log-probabilities. Free those that end."""
        now = self.clock()
        done: list[int] = []
        reported: dict[str, Job] = {}
        for b in at.tolist():
            row = int(rows[b])
            completion = self._completions[self.scheduler.request_in(row).request_id]
            job = completion.job
            if job.first_token_time is None:
                job.first_token_time = now
            stop = self._advance(completion, row, sampled.logprobs.get(b, []))
            self._release_followers(job)
            if stop is not None:
                done.append(row)
                self._finish(completion, *stop)
                self._forget_row(row)
            else:
                self._read_from[row] = 0 if completion.reads_every_token else completion.request.max_len
            if job.stream or not job.num_unfinished:
                reported[job.request_id] = job
        if done:
            self.scheduler.finish(np.array(done, np.int32))
        return [self._report(job) for job in reported.values()]

    def _advance(
        self, completion: Completion, row: int, logprobs: list[TokenLogprobs]
    ) -> tuple[list[int], FinishReason, int | str | None] | None:
        """Read the row's new tokens one by one. The final tokens, the reason and what stopped it, or None."""
        start, known = int(self.states.prompt_len[row]), int(self.states.num_tokens[row])
        output = self.states.token_ids[row, start:known]
        params, text = completion.params, completion.text
        reads = completion.reads_every_token
        new = completion.num_read if reads else max(0, len(output) - 1 - self.states.max_num_draft_tokens)
        for i, token in enumerate(output[new:].tolist(), new):
            if reads:
                completion.logprobs += logprobs[i - new : i - new + 1]
            if token in completion.end_ids:
                is_eos = token in self.eos_token_ids and not params.ignore_eos
                return output[: i + 1].tolist(), "stop", None if is_eos else token
            if reads:
                completion.num_read = i + 1
                if text is not None and text.push([token], may_stop=i + 1 >= params.min_tokens):
                    return output[: i + 1].tolist(), "stop", text.stop
        return (output.tolist(), "length", None) if known >= self.scheduler.max_len[row] else None

    # -- the life of a completion -----------------------------------------------------------------------------------

    def add(self, job: Job, *, priority: int = 0, lora_id: int = 0, cache_salt: str | None = None) -> None:
        """Let a checked request in. RequestError for options of other types; then nothing has changed."""
        check_options(job.request_id, priority=priority, lora_id=lora_id, cache_salt=cache_salt)
        params, prompt = job.params, np.array(job.prompt_token_ids, np.int32)
        limit = self.states.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        self._is_end[list(end_ids)] = True
        count = params.best_of or params.n
        seed = params.seed if params.seed is not None else derived_seed(self._seed, self._arrivals + 1)
        keys = prefix_keys(self.cache.tree.block_size, lora_id=lora_id, salt=cache_salt)
        wanted = 0 if params.logprobs is None and count > params.n else params.logprobs
        for index in range(count):
            request = Request(
                request_id=job.request_id if count == 1 else f"{job.request_id}\0{index}",
                prompt=prompt,
                arrival=self._arrivals,
                max_len=limit,
                params=replace(
                    params,
                    seed=derived_seed(seed, index),
                    logprobs=wanted,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    n=1,
                    best_of=None,
                ),
                reuse_prefix=params.prompt_logprobs is None or index > 0,
                priority=priority,
                lora_id=lora_id,
                keys=keys,
            )
            self._arrivals += 1
            completion = Completion(job, index, request, end_ids, self._text_stream(params))
            self._completions[request.request_id] = completion
            job.completions.append(completion)
        job.num_unfinished = count
        self._jobs[job.request_id] = job
        self.scheduler.add(job.completions[0].request)
        if self.config.prefix_caching:
            job.followers = job.completions[1:]
        else:
            for completion in job.completions[1:]:
                self.scheduler.add(completion.request)

    def _welcome(self, plan: StepPlan) -> None:
        """Take note of the rows that the plan's admissions got."""
        for request in plan.admitted:
            completion = self._completions[request.request_id]
            job, row = completion.job, request.row
            # The first token of a job is looked at for its time, and because its followers wait for it.
            read_all = completion.reads_every_token or job.first_token_time is None
            self._read_from[row] = 0 if read_all else request.max_len
            self.sampler.set_request(row, request.params, np.array(sorted(completion.end_ids), np.int64))
            if self.speculation is not None:
                self.speculation.start(row)
            if job.first_scheduled_time is None:
                job.first_scheduled_time = self.clock()

    def _finish(
        self, completion: Completion, token_ids: list[int], why: FinishReason, stop_reason: int | str | None
    ) -> None:
        job = completion.job
        completion.finish(token_ids, why, stop_reason)
        del self._completions[completion.request.request_id]
        if not job.num_unfinished:
            job.finished_time = self.clock()
            self._jobs.pop(job.request_id, None)

    def _release_followers(self, job: Job) -> None:
        """The prompt is in the cache now: the other completions start from it."""
        followers, job.followers = job.followers, []
        for completion in followers:
            self.scheduler.add(completion.request)

    def _forget_row(self, row: int) -> None:
        self._read_from[row] = 0
        self.sampler.clear_request(row)

    def _report(self, job: Job) -> RequestOutput:
        if not job.num_unfinished:
            return job.final()
        return job.result([c.output(self._tokens_so_far(c)) for c in job.completions])

    def _tokens_so_far(self, completion: Completion) -> list[int]:
        request = completion.request
        if completion.finish_reason is not None:
            return completion.token_ids
        row, tokens = request.row, request.output
        if row >= 0:
            tokens = self.states.token_ids[row, len(request.prompt) : int(self.states.num_tokens[row])]
        so_far: list[int] = tokens.tolist()
        return so_far

    # -- text ----------------------------------------------------------------------------------------------------

    def _encode(self, request_id: str, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(request_id, "prompt", text, "needs a tokenizer", "Pass token ids.")
        return self.tokenizer.encode(text)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each bad word, at the beginning of a text and inside it."""
        if self.tokenizer is None:
            return []
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        ids = (self.tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings)
        return [word for word in ids if word]

    def _text_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens, continues=True)
        return TextStream(detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output)
