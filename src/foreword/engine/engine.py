"""The engine's loop.

    add_request ─▶ Scheduler.schedule ─▶ prepare_inputs ─▶ Executor.launch ─▶ result ─▶ commit ─▶ outputs

In a step, Python code handles single requests only if they start, end, stream, or may stop. Everything else is array
operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

import numpy as np

from foreword.batch import ContextParallel, KVGroup, PoolingParams, RequestStates, SamplingParams, advance
from foreword.cache import BlockTier, CacheEvent, CacheMiss, KVCacheManager, TierFactory, hash_block
from foreword.engine.config import SET_METHOD, EngineConfig
from foreword.engine.defaults import DEFAULT_PARAMS, described
from foreword.engine.intake import Intake, Tokenizer
from foreword.engine.loras import Loras, ReadLora
from foreword.engine.observer import EngineObserver, Observers
from foreword.engine.output_processor import NOTHING_READ, OutputProcessor, Readings
from foreword.engine.outputs import RequestOutput
from foreword.engine.pipeline import InFlightStep, Pipeline
from foreword.engine.prompt import EncoderPrompts, Prompt
from foreword.engine.recorder import EngineRecorder
from foreword.engine.request_group import RequestGroup, RequestOptions
from foreword.engine.speculation import Drafter, ForcedTokens, Speculation
from foreword.engine.tiers import Tiers, block_format, hash_with_adapters
from foreword.engine.transaction import Transaction
from foreword.errors import ConfigError, RequestError
from foreword.executors import Capability, Executor, StartedExecutor
from foreword.models.lora import LoraAdapter
from foreword.models.pooling import PoolingSpec
from foreword.plugins import made
from foreword.sampling import Grammar, LogitsProcessor, Processors, Sampled
from foreword.scheduler import Reason, Request, Scheduler, StepPlan
from foreword.scheduler.ledger import reason
from foreword.structured import GrammarCompiler


class Engine:
    """Serves requests on one executor. It is not thread-safe: one thread adds, steps and aborts.

    states, cache, scheduler and observers are its parts. pooling: what the model computes besides text. generates:
    whether it generates text.
    suggested: fields of `SamplingParams` that the model suggests to requests which leave them open. default_params: the
    parameters of requests that have none. notes: lines for a log about the start.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        vocab_size: int,
        max_model_len: int,
        kv_groups: Sequence[KVGroup],
        num_blocks: int,
        num_states: int = 0,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
        drafter: Callable[[RequestStates], Drafter] | None = None,
        grammars: GrammarCompiler | None = None,
        logits_processors: Iterable[Callable[[RequestStates], LogitsProcessor]] = (),
        observers: Iterable[EngineObserver] = (),
        pooling: PoolingSpec | None = None,
        generates: bool = True,
        prefix_lm: bool = False,
        read_lora: ReadLora | None = None,
        encoder: EncoderPrompts | None = None,
        context_parallel: ContextParallel | None = None,
        suggested: Mapping[str, Any] | None = None,
        tiers: Sequence[TierFactory] = (),
        model_key: bytes = b"",
    ) -> None:
        """Build the parts of an engine around an executor.

        num_blocks: the size of the executor's pool. num_states: its slots for states of recurrent layers, whose numbers
        follow those of blocks; 0: states are in blocks. drafter: makes the drafter, in place of the configured method.
        grammars: compiles structured outputs. read_lora: reads an adapter of the executor's model.
        logits_processors: make the custom logits processors over the engine's state rows, in their order.
        pooling: what the executor's pooler does. generates: whether the model computes logits. prefix_lm: whether the
        tokens of a prompt see each other.
        encoder: reads the prompts of an encoder–decoder. context_parallel: the ranks that KV groups are spread over.
        tiers: make the places that keep blocks outside the pool, the first one asked first. model_key: what tells the
        model from others whose blocks these may keep, too.
        """
        self.config = config = (config or EngineConfig()).resolved(
            never_drafts=f"an Engine does not speculate by default; {SET_METHOD}"
        )
        has_states = any(group.recurrent for group in kv_groups)
        if has_states and Capability.RECURRENT_STATE not in executor.capabilities:
            raise ConfigError(
                f"kv_groups: {type(executor).__name__} does not support recurrent KV groups "
                "(Capability.RECURRENT_STATE); use an executor that does"
            )
        can_draft = not has_states or Capability.DRAFTED_STATES in executor.capabilities
        if config.speculation and not can_draft:
            raise ConfigError(
                f"speculation: {type(executor).__name__} does not support drafts with recurrent KV groups "
                "(Capability.DRAFTED_STATES); use an executor that does, or leave speculation out"
            )
        if context_parallel is not None and Capability.CONTEXT_PARALLEL not in executor.capabilities:
            raise ConfigError(
                f"context_parallel: {type(executor).__name__} does not support KV groups spread over ranks "
                "(Capability.CONTEXT_PARALLEL); use executor='torch' with context_parallel_size"
            )
        if prefix_lm and Capability.BIDIRECTIONAL not in executor.capabilities:
            raise ConfigError(
                f"prefix_lm: {type(executor).__name__} does not support prompts whose tokens see each other "
                "(Capability.BIDIRECTIONAL); use an executor that does, or set prefix_lm to false in the model's "
                "config.json, which makes attention causal"
            )
        self.executor, self.clock = executor, clock
        self.pooling, self.generates = pooling or PoolingSpec(), generates
        self.suggested: Mapping[str, Any] = suggested or {}
        self.default_params = replace(DEFAULT_PARAMS, **self.suggested)
        self.observers = Observers(observers)
        eos = frozenset(eos_token_ids)
        limits = config.scheduler
        most_forced = config.max_forced_tokens if can_draft else 0
        self.states = states = RequestStates(
            max_num_reqs=limits.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            kv_groups=list(kv_groups),
            context_parallel=context_parallel,
            max_num_draft_tokens=max(most_forced, config.num_speculated_tokens),
        )
        self.speculation = Speculation(states, config.speculation, drafter) if config.speculation else None
        self.cache = KVCacheManager(
            states,
            num_blocks,
            num_states=num_states,
            prefix_caching=config.reuses_prefixes,
            partial_reuse=config.partial_reuse,
            hash_function=hash_with_adapters(lambda lora_id: self.loras.content_of(lora_id)) if tiers else hash_block,
            on_event=self._on_cache_event if tiers or self.observers.wants_cache_events else None,
        )
        checker = None
        if config.check == "full":
            from foreword.batch import CacheChecker  # imported here because few engines load the specification

            checker = CacheChecker.of(states)
            self.cache.pool.observers.append(checker)
        self.tiers: Tiers | None = None
        if tiers:
            blocks = block_format(executor, kv_groups, model_key)
            self.tiers = Tiers(
                [made("tiers", make, blocks, kind=BlockTier) for make in tiers], self.cache, executor, checker
            )
        self.scheduler = Scheduler(states, self.cache, limits)
        custom = [made("logits_processors", make, states, kind=LogitsProcessor) for make in logits_processors]
        processors = Processors(states, custom, eos_token_ids=tuple(eos))
        self.pipeline = Pipeline(
            states,
            executor,
            processors,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            depth=2 if config.async_scheduling else 1,
            check=config.check,
        )
        self.notes: list[str] = []
        if self.suggested:
            given = described(self.suggested)
            self.notes.append(f"the model suggests {given}: requests have that unless they give their own")
        if isinstance(executor, StartedExecutor):
            self.notes += executor.start(states, max_num_batched_tokens=limits.max_num_batched_tokens)
        self._forced = ForcedTokens(
            states, self.pipeline.grammars, most_forced, self.pipeline.grammar_thread.forced_tokens
        )
        self._outputs = OutputProcessor(states, eos_token_ids=eos, clock=self._now)
        self.loras = Loras(executor, read_lora, config.lora_bytes, self._outputs.lora_ids, reads_content=bool(tiers))
        special = () if tokenizer is None else tokenizer.special_token_ids.values()
        self._refined = partial(CacheMiss.among, special=special, ends=eos)
        self.recorder: EngineRecorder | None = None
        if config.record is not None or config.flight_steps:
            self.recorder = EngineRecorder(
                states, config, loras=self.loras, num_blocks=num_blocks, clock=clock, refined=self._refined
            )
            self.observers.add(self.recorder)
        self._intake = Intake(
            states,
            executor,
            processors,
            loras=self.loras,
            node_size=self.cache.tree.block_size,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            grammars=grammars,
            seed=config.seed,
            clock=self._now,
            pooling=self.pooling,
            generates=generates,
            prefix_lm=prefix_lm,
            encoder=encoder,
            most_new_tokens=limits.max_num_batched_tokens,
            max_logprobs=config.max_logprobs,
            default_params=self.default_params,
        )
        # the step that was prepared (and perhaps launched) during the last one, and is not resolved yet
        self._planned: InFlightStep | None = None
        self._committing: InFlightStep | None = None
        changes = ("add", "abort", "step", "reset_prefix_cache", "load_lora", "drop_lora")
        self._transaction = Transaction(self, changes, self._restore)
        self._ready: list[RequestOutput] = []  # outputs that the next `step` returns, even after an error

    # -- requests ----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine holds memory and requests of its process. Make one in each, with build_engine")

    @property
    def has_work(self) -> bool:
        """Return whether there is work for `step`."""
        return bool(self._outputs.groups) or bool(self._ready)

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs.groups)

    def __contains__(self, request_id: object) -> bool:
        """Return whether the request is in the engine."""
        return request_id in self._outputs.groups

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Add a request. Raise RequestError if it cannot be served as given; then nothing has changed.

        With PoolingParams its output has ``pooled`` and no tokens.
        """
        self.add(self.check(request_id, prompt, params, **options))

    def settle_grammar(self, params: SamplingParams, seconds: float) -> bool:
        """See `GrammarCompiler.settle`. It may run in another thread."""
        return self._intake.settle_grammar(params, seconds)

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        prompt_text: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        """Return the group for `add`. This changes nothing, and may run in another thread. Raise RequestError as in
        `add_request`.

        prompt_text: the text that the token ids were made from, for the output.
        """
        group = self._intake.check(request_id, prompt, params, prompt_text, **options)
        self._check_unused(request_id)
        return group

    def add(self, group: RequestGroup) -> None:
        """Add a checked request. Raise RequestError for an id in use, and for an adapter that is no longer loaded."""
        self._check_unused(group.request_id)
        adapter = self.loras.read_again(group.request_id, group.lora)
        with self._transaction:
            group.lora_id = self.loras.enter(group.lora, adapter)
            self._intake.expand(group)
            for completion in group.completions:
                self.scheduler.policy.key_of(completion.request, group.request_id)
            first, *others = group.completions
            group.siblings = others if self.config.reuses_prefixes else []
            self._outputs.add(group)
            for completion in [first] if self.config.reuses_prefixes else group.completions:
                self._schedule(completion.request)
        try:
            self.observers.notify("request_added", group.request_id, len(group.prompt))
        except BaseException:
            self.abort(group.request_id)
            raise

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once, with its tokens so far. Return None for an unknown id, such as in a second call."""
        _check_id(request_id)
        with self._transaction:
            mine = [output for output in self._ready if output.request_id == request_id]
            self._ready = [output for output in self._ready if output.request_id != request_id]
            group = self._outputs.groups.get(request_id)
            if group is None:
                return None
            self._end(group, None)
            output = group.final().following(mine[0] if mine else None)
            self._forget([output])
            self.observers.post("request_ended", output)
        self.observers.deliver()
        return output

    def give_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Give back outputs of `step` that belong to another caller. The next `step` returns them again."""
        self._ready[:0] = outputs

    @property
    def follows_grammars(self) -> bool:
        """Return whether outputs can be constrained by grammars."""
        return Capability.GRAMMAR in self.executor.capabilities

    def why(self, request_id: str) -> Reason:
        """Return the reason why a request waits, or `running`."""
        _check_id(request_id)
        group = self._outputs.groups.get(request_id)
        if group is None:
            return reason("unknown")
        first = next(c for c in group.completions if c.finish_reason is None)
        if first in group.siblings:
            return reason("prompt_of", request=request_id)
        if self.tiers is not None and first.request.request_id in self.tiers:
            return reason("loading")
        return self.scheduler.why(first.request.request_id)

    def cache_miss(self, request_id: str) -> CacheMiss | None:
        """Return why no more of a request's prompt was in the cache. Return None before its first admission, if the
        whole prompt was in the cache, and for an unknown id.
        """
        group = self._outputs.groups.get(request_id)
        found = None if group is None else group.completions[0].request.cache_miss
        return None if found is None else self.refined(found)

    def loaded_tokens(self, request_id: str) -> Mapping[str, int]:
        """Return how many of a request's prompt tokens were read from outside the pool, by the name of the tier."""
        group = self._outputs.groups.get(request_id)
        return {} if group is None else group.completions[0].request.loaded_tokens

    def refined(self, miss: CacheMiss) -> CacheMiss:
        """Return a request's `CacheMiss`, refined with the special tokens of the model: see `CacheMiss.among`."""
        return self._refined(miss)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False, and change nothing, while requests hold blocks."""
        with self._transaction:
            is_reset = self.cache.reset()
        self.observers.deliver()
        return is_reset

    def load_lora(self, name: str, path: str | Path | LoraAdapter) -> None:
        """Load an adapter (a path, or the result of `Loras.read`) under a name. It replaces an adapter with this name.

        Requests in progress end with the adapter that they began with. Raise ModelError if it cannot be used,
        ConfigError for a name that is not text, or if the executor runs no adapters, MemoryError if it does not fit.
        """
        self.loras.check_name(name)
        adapter = path if isinstance(path, LoraAdapter) else self.loras.read(path)
        with self._transaction:
            self.loras.load(name, adapter)

    def drop_lora(self, name: str) -> None:
        """Unload an adapter. Requests in progress continue with it until they end. Raise ConfigError for an unknown
        name.
        """
        self.loras.check_known(name)
        with self._transaction:
            self.loras.drop(name)

    def close(self) -> None:
        """End the engine's threads. The engine can be used again. Its executor stays, because other engines may use
        it.
        """
        self.pipeline.close()
        if self.tiers is not None:
            for request in self.tiers.close():
                self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.close()

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the outputs of requests that ended, and of streaming requests with new tokens.

        If it raises, at any point, each request is in its state before the step or after it. The next `step` returns
        those that had ended; all others wait with their tokens. A RequestError of one request, for example if the
        executor cannot compute its input, only ends that request.
        """
        try:
            with self._transaction:
                self._run_step()
        except BaseException as error:
            if self.observers.members:
                self.observers.notify_done("step_failed", error)
            group = self._outputs.group_of(error.request_id) if isinstance(error, RequestError) else None
            if group is None or not isinstance(error, RequestError):
                raise
            with self._transaction:
                self._end(group, RequestError(group.request_id, error.field, error.value, error.reason, error.fix))
                self._report([group.final()])
        finally:
            if self.observers.members:
                self.observers.deliver()
        outputs, self._ready = self._ready, []
        return outputs

    def _run_step(self) -> None:
        begin = self.clock()
        step = None if self._planned is None else self._take_planned(self._planned)
        was_planned = step is not None
        if step is None:
            self._load_blocks()
            step = self._plan()
        if step is None:
            return
        if self.observers.members:
            self.observers.notify("step_planned", step.plan, step.batch)
        if step.pending is None:
            self._save_blocks()
            self.pipeline.launch(step)
        if was_planned:
            self._load_blocks()
        planning, planned, error = None, None, None
        if self.config.async_scheduling:
            advance(self.states, step.batch)
            if step.runs_ahead and self.speculation is None:
                planned = self._plan(step.plan)
                if planned is not None:
                    self._save_blocks()
                    self.pipeline.launch_ahead(planned)
            else:
                planning = self.pipeline.overlap(partial(self._plan, step.plan))
        sampled = step.result()
        if planning is not None:
            planned, error = planning.wait()
        if self.observers.members:
            self.observers.notify("step_ran", step.plan, step.batch, sampled)
        self._commit(step, sampled)
        if error is not None:
            raise error
        self._planned = planned
        seconds = self.clock() - begin
        self.scheduler.measure(step.plan, seconds)
        if self.speculation is not None:
            self.speculation.measure(step.plan, seconds)

    def _take_planned(self, step: InFlightStep) -> InFlightStep | None:
        """Resolve and return the step that was planned during the last one; None if all of its requests have ended."""
        self._planned = None
        plan = self.scheduler.resolve(step.plan)
        if not len(plan.rows):
            self.pipeline.release(step)
            return None
        self.pipeline.resolve(step, plan)
        return step

    def _plan(self, in_flight: StepPlan | None = None) -> InFlightStep | None:
        """Plan and prepare the next step; None if no request can run now."""
        if in_flight is not None:
            if self.speculation is not None:
                self.speculation.reserve_draft_slots(self.scheduler, in_flight)
            self._forced.reserve_draft_slots(self.scheduler, in_flight)
        plan = self.scheduler.schedule(in_flight)
        if plan.preempted:
            self.pipeline.forget_grammars()
        for request in plan.admitted:
            if self.tiers is not None:
                self.tiers.admitted(request)
            self._on_admitted(request.row, self._outputs.admitted(request).grammar)
        return self.pipeline.prepare(plan) if len(plan.rows) else None

    def _schedule(self, request: Request) -> None:
        """Add a request to the scheduler, after the blocks of its prompt that are outside the pool are read."""
        if self.tiers is None or not self.tiers.take(request):
            self.scheduler.add(request)

    def _unschedule(self, request_id: str) -> None:
        """Remove a request that ends from the tiers or the scheduler."""
        self.scheduler.remove(request_id)
        if self.tiers is not None:
            for request in self.tiers.remove(request_id):
                self.scheduler.add(request)

    def _load_blocks(self) -> None:
        """Copy blocks that were read from the tiers into free blocks, and begin to read those of a preempted request.
        This is not done while a step waits for its launch, because its block copies may write to blocks of requests
        that have ended since it was planned.
        """
        if self.tiers is not None:
            self.scheduler.take_preempted(self.tiers.take)
            for request in self.tiers.ready(is_idle=not self.scheduler.has_work):
                self.scheduler.add(request)

    def _save_blocks(self) -> None:
        """Offer the content of blocks to the tiers before a step writes to them."""
        if self.tiers is not None:
            self.tiers.save()

    def _on_cache_event(self, event: CacheEvent) -> None:
        if self.tiers is not None:
            self.tiers.cache_event(event)
        if self.observers.wants_cache_events:
            self.observers.post("cache_event", event)

    def _on_admitted(self, row: int, grammar: Grammar | None) -> None:
        if grammar is not None:
            self.pipeline.grammars[row] = grammar
        else:
            self.pipeline.grammars.pop(row, None)
        if self.speculation is not None:
            self.speculation.start(row)

    def _commit(self, step: InFlightStep, sampled: Sampled) -> None:
        plan, rows, states = step.plan, step.plan.rows, self.states
        # A decode step adds one token to each of its rows.
        decoded = not len(plan.prefilling) and plan.draft_tokens is None
        before = None if decoded else states.num_tokens.take(rows)
        self._committing = step
        states.commit(step.batch, sampled.token_ids)
        if self.observers.members:
            self.observers.notify_done("step_committed", plan, step.batch, sampled)
        self.pipeline.release(step)
        self.scheduler.commit(plan)
        num_drafts = None if plan.draft_tokens is None else self._forced.others(rows, step.batch.num_draft_tokens)
        readings = self._outputs.process(rows, before, sampled, step.batch.step, num_drafts)
        proposes = self.speculation is not None or bool(self.pipeline.grammars)
        grown = rows
        if proposes and before is not None:
            grown = rows[states.num_tokens.take(rows) > before]
        if self.speculation is not None:
            self.speculation.learn(plan, sampled.token_ids, self._forced.is_forced)
            self.speculation.follow(step.batch, sampled.token_ids)
        if readings is not NOTHING_READ:
            self._apply(readings)
        self._committing = None
        self._save_blocks()
        if proposes:
            going_on = grown if readings is NOTHING_READ else grown[states.live[grown]]
            others = self._forced.propose_next(self.scheduler, going_on)
            if self.speculation is not None:
                self.speculation.propose_next(self.scheduler, others)

    def _end(self, group: RequestGroup, error: RequestError | None) -> None:
        """End the completions that still run or wait, with an error or as aborted."""
        group.siblings = []
        for completion in group.completions:
            if completion.finish_reason is None:
                row = completion.request.row
                self._unschedule(completion.request.request_id)
                self.pipeline.grammars.pop(row, None)
                self._outputs.end(completion, error or (completion.request.output.tolist(), "abort", None))

    def _apply(self, readings: Readings) -> None:
        for request in readings.ready:
            self.scheduler.add(request)
        for row in readings.ended_rows:
            self.pipeline.grammars.pop(row, None)
        if readings.ended_rows:
            self.scheduler.finish(np.array(readings.ended_rows, np.int32))
        self._report(readings.outputs)

    def _report(self, outputs: list[RequestOutput]) -> None:
        self._ready += outputs
        self._forget(outputs)
        for output in outputs:
            if output.finished:
                self.observers.post("request_ended", output)

    def _forget(self, outputs: list[RequestOutput]) -> None:
        self._outputs.remove(outputs)
        if any(output.finished for output in outputs):
            self.loras.collect()

    def _restore(self) -> None:
        """Restore the engine after a failure anywhere in a change: no step is in flight, and unfinished requests wait
        with their tokens.

        The samples of a step that was not completely committed are dropped; equal seeds draw them again.
        """
        self.pipeline.reset()
        if self.tiers is not None:
            self.tiers.clear()
        self._planned = None
        num_tokens = self.states.num_tokens.copy()
        if self._committing is not None:
            batch = self._committing.batch
            rows = batch.idx_mapping
            end = batch.num_computed_tokens + batch.num_scheduled_tokens - batch.num_draft_tokens
            known = np.maximum(end, self.states.prefill_len[rows])  # before the commit; a prompt chunk adds no token
            num_tokens[rows] = np.minimum(num_tokens[rows], known)
        requests = [completion.request for completion in self._outputs.unfinished()]
        self.scheduler.free_all(requests, num_tokens)
        self._committing = None
        ended = self._outputs.rewind()
        for completion in self._outputs.unfinished():
            self.scheduler.add(completion.request)
        reported = {output.request_id for output in self._ready if output.finished}
        self._report([output for output in ended if output.request_id not in reported])
        self.loras.restore()

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._outputs.groups:
            raise RequestError(request_id, "request_id", request_id, "is in use", "Use another id.")

    def _now(self) -> float:
        return self.clock()


def _check_id(request_id: object) -> None:
    if not isinstance(request_id, str):
        raise RequestError(None, "request_id", request_id, "is not the id of a request", "Give a str.")
