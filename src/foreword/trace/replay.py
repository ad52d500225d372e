"""Follow the states of a trace's engine, event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from foreword.arrays import I64
from foreword.batch import Backend, BlockOps, InputBatch, InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.batch.difference import extras_from_json
from foreword.errors import ForewordError, PlanError
from foreword.trace.capture import filled
from foreword.trace.events import Add, AppendBlocks, Commit, Correct, Event, Remove, Restart, Step, Tokens, ids_of
from foreword.trace.header import TraceHeader
from foreword.trace.reader import Trace
from foreword.trace.recorder import add_of

MAX_ENTRIES = 2**28
"""The limit of the entries of all arrays of a replay, 4 bytes each."""


class Replay:
    """Applies the events of a trace to states of its own.

        replay = Replay(trace.header, max_num_reqs=len(trace.events))
        for event in trace.events:
            batch = replay.apply(event)          # for a step its tensors, else None

    states: the requests as the engine has them. batch: the last step. num_steps: the number of steps so far. step: the
    engine's number of the last step. max_num_reqs: the number of rows, if fewer rows than the engine's are sufficient.
    """

    def __init__(self, header: TraceHeader, *, backend: Backend = "auto", max_num_reqs: int | None = None) -> None:
        """Raise PlanError for a header whose arrays would have more than MAX_ENTRIES entries."""
        reqs = header.max_num_reqs if max_num_reqs is None else max(min(header.max_num_reqs, max_num_reqs), 1)
        tokens, length, drafts = header.max_num_batched_tokens, header.max_model_len, header.max_num_draft_tokens
        blocks = sum(-(-length // group.block_size) for group in header.kv_groups)
        entries = reqs * (length + 2 * blocks + 2 * drafts) + tokens * (8 + 2 * len(header.kv_groups))
        if entries > MAX_ENTRIES:
            raise PlanError(
                f"max_num_reqs={reqs}, max_model_len={length}, max_num_batched_tokens={tokens}, max_num_draft_tokens="
                f"{drafts}: the replay would need {entries} entries, above the limit of {MAX_ENTRIES}; record with "
                "the sizes that the engine uses"
            )
        self.header = header
        self.states: RequestStates = header.new_states(reqs)
        self.batch: InputBatch | None = None
        self.num_steps, self.step = 0, header.first_step - 1
        self._caching: dict[str, tuple[str | None, str]] = {}  # salt and miss by request, of those that have one
        self._buffers = InputBuffers.for_states(self.states, tokens)
        self._backend: Backend = backend

    def apply(self, event: Event) -> InputBatch | None:
        """Apply an event, and return the batch of a step. Raise PlanError for one that the states do not allow."""
        try:
            return self._apply(event)
        except ForewordError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PlanError(f"{event.kind} cannot be replayed ({error})") from error

    def live_requests(self) -> list[Add]:
        """Return events that admit the requests in progress with the tokens and blocks that they have now."""
        found = []
        for req_id in self.states.req_ids:
            salt, miss = self._caching.get(req_id, (None, ""))
            found.append(replace(added(self.states, req_id), cache_salt=salt, cache_miss=miss))
        return found

    @staticmethod
    def rebase(trace: Trace, k: int) -> Trace:
        """Return the trace from its k-th step on, counted from 0. Requests in progress are admitted with the tokens and
        blocks that they have at that step, and the events since the step before come first.
        """
        replay = Replay(trace.header, max_num_reqs=len(trace.events))
        for i, event in enumerate(trace.events):
            if isinstance(event, Step) and replay.num_steps == k:
                header = trace.header.beginning_at(replay.step + 1)
                return Trace(header, [*replay.live_requests(), *trace.events[i:]], trace.damage)
            replay.apply(event)
        raise PlanError(f"the trace has {replay.num_steps} steps, so there is no step {k}")

    def _apply(self, event: Event) -> InputBatch | None:
        states = self.states
        match event:
            case Step():
                return self._step(event)
            case Add():
                self._add(event)
            case AppendBlocks():
                states.append_blocks(event.req_id, event.block_ids)
            case Correct():
                self._correct(event)
            case Remove():
                states.row_of(event.req_id)  # raises for an unknown request
                states.remove_request(event.req_id)
            case Commit():
                if self.batch is None:
                    raise PlanError("a commit needs a step before it")
                states.commit(self.batch, {req_id: _list(tokens) for req_id, tokens in event.tokens.items()})
            case Restart():
                for req_id in states.req_ids:
                    states.remove_request(req_id)
                self.batch, self.step = None, event.first_step - 1
        return None

    def _add(self, event: Add) -> None:
        prompt, outputs = ids_of(event.prompt_token_ids), ids_of(event.output_token_ids)
        known, computed = len(prompt) + len(outputs), event.num_computed_tokens
        prefill = known if event.prefill_len is None else event.prefill_len
        if not len(prompt) <= prefill <= known:
            raise PlanError("prefill_len is outside of the known tokens", request=event.req_id, got=prefill)
        extras = extras_from_json(event.extras)
        first, is_grown = outputs[: prefill - len(prompt)], prefill < known
        now, blocks = (0, [[] for _ in event.block_ids]) if is_grown else (computed, event.block_ids)
        extras |= {"lora_id": event.lora_id, "bidirectional_ranges": event.bidirectional_ranges}
        rotary = event.mrope_positions if len(event.mrope_positions) else None
        extras |= {"mrope_positions": rotary, "mrope_delta": event.mrope_delta}
        self.states.add_request(NewRequest(event.req_id, prompt, blocks, first, now, **extras))
        self._caching.pop(event.req_id, None)
        if event.cache_salt is not None or event.cache_miss:
            self._caching[event.req_id] = event.cache_salt, event.cache_miss
        if is_grown:  # its blocks cover all of its tokens; blocks below a window are null
            tokens = np.concatenate([np.asarray(prompt), np.asarray(outputs)])
            self.states.rewrite(event.req_id, tokens, computed, event.block_ids)

    def _step(self, event: Step) -> InputBatch:
        plan = dict(zip(event.req_ids, np.asarray(event.counts).tolist(), strict=True))
        zero, copies = np.asarray(event.zero, np.int32), np.asarray(event.copies, np.int32).reshape(-1, 2)
        self.batch = batch = prepare_inputs(
            self.states,
            plan,
            self._buffers,
            draft_tokens={req_id: _list(ids) for req_id, ids in event.draft_tokens.items()} or None,
            pad_to=event.pad_to,
            order=event.order,  # type: ignore[arg-type]  # prepare_inputs refuses another one
            backend=self._backend,
            block_ops=BlockOps.of(zero.tolist(), copies.tolist(), null_block=self.states.null_block),  # type: ignore[arg-type]
            check="full" if self._backend == "device" else "off",  # its tensors are not the arrays of the batch
        )
        self.num_steps += 1
        self.step += 1
        return batch

    def _correct(self, event: Correct) -> None:
        now = added(self.states, event.req_id)
        tokens: I64 = np.concatenate([np.asarray(now.prompt_token_ids), np.asarray(now.output_token_ids)])
        tokens = tokens[: event.num_tokens]
        if event.token_ids is not None:
            at, ids = event.token_ids
            if at > len(tokens):
                raise PlanError("corrected tokens leave a gap", request=event.req_id, expected=len(tokens), got=at)
            given = np.asarray(ids_of(ids), np.int64)
            tokens = np.concatenate([tokens[:at], given, tokens[at + len(given) :]])
        computed = now.num_computed_tokens if event.num_computed_tokens is None else event.num_computed_tokens
        self.states.rewrite(event.req_id, tokens, min(computed, len(tokens) - 1), event.block_ids)


def added(states: RequestStates, req_id: str) -> Add:
    """Return the event that admits a request with the tokens and blocks that it has now."""
    return add_of(filled(states, states.row_of(req_id), req_id))


def _list(tokens: Tokens) -> list[int]:
    return [int(token) for token in ids_of(tokens)]
