"""Turn the committed tokens of a step into outputs: stops, text, log-probabilities, and the requests that end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foreword.arrays import I32, I64
from foreword.batch import RequestStates
from foreword.engine.outputs import FinishReason, RequestOutput
from foreword.engine.request_group import Completion, RequestGroup, StopReason
from foreword.sampling import Sampled, TokenLogprobs
from foreword.scheduler import Request
from foreword.versions import Memo

Stop = tuple[list[int], FinishReason, StopReason]  # the final tokens, and why they end


@dataclass(slots=True, eq=False)
class Readings:
    """The result of reading a step.

    outputs: of groups that ended, and of streaming ones with new tokens. ended_rows: rows to free. ready: siblings
    whose prompt is in the cache now, for the scheduler.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    ended_rows: list[int] = field(default_factory=list)
    ready: list[Request] = field(default_factory=list)


NOTHING_READ = Readings()


class OutputProcessor:
    """The groups in the engine, and what is read of their tokens.

    A step touches in Python only the requests that start, end, stream, or may stop at their new token.
    """

    def __init__(self, states: RequestStates, *, eos_token_ids: frozenset[int], clock: Callable[[], float]) -> None:
        self.groups: dict[str, RequestGroup] = {}
        self._states, self._eos_token_ids, self._clock = states, eos_token_ids, clock
        self._by_request: dict[str, Completion] = {}  # by the scheduler's request id
        self._by_row: list[Completion | None] = [None] * states.max_num_reqs
        # By row, the number of known tokens from which on its new tokens are read: 0 for every token (streams, stop
        # strings, log-probabilities, the first token of a group), else its length limit.
        self._read_from = np.zeros(states.max_num_reqs, np.int32)
        # By the rows of a step, of which nothing was read, for the steps until one reaches a length to read from.
        self._unread = Memo[I32, bool]()
        self._num_drafts = np.zeros((2, states.max_num_reqs), np.int64)  # by row: proposed, accepted
        self._is_end = np.zeros(states.vocab_size, np.bool_)  # token ids that may end some request

    def add(self, group: RequestGroup) -> None:
        """Register an expanded group."""
        self.groups[group.request_id] = group
        for completion in group.completions:
            self._by_request[completion.request.request_id] = completion
            self._is_end[list(completion.end_ids)] = True

    def admitted(self, request: Request) -> Completion:
        """Record that the request was given a row. Return its completion."""
        completion = self._by_request[request.request_id]
        group, row = completion.group, request.row
        self._leave(completion)
        if (last := self._by_row[row]) is not None and last.row == row:  # it may have another row since
            self._leave(last)
        self._by_row[row], completion.row = completion, row
        # The first token of a group is read for its time, and because the siblings wait for it.
        every_token = completion.reads_every_token or group.first_token_time is None
        self._read_from[row] = 0 if every_token else request.max_len
        if group.first_scheduled_time is None:
            group.first_scheduled_time = self._clock()
        return completion

    def _leave(self, completion: Completion) -> None:
        """Take the counts of the row that the completion was given last, which another one may get."""
        if (row := completion.row) >= 0:
            completion.row = -1
            proposed, accepted = self._num_drafts[:, row].tolist()
            completion.num_drafts = (completion.num_drafts[0] + proposed, completion.num_drafts[1] + accepted)
            self._num_drafts[:, row] = 0

    def end(self, completion: Completion, stop: Stop | Exception) -> None:
        """End a completion with these tokens, or with its tokens so far and an error."""
        self._leave(completion)
        if isinstance(stop, Exception):
            completion.fail(self._tokens_so_far(completion), stop)
        else:
            try:
                completion.finish(*stop)
            except MemoryError:
                raise
            except Exception as error:  # the detokenizer's
                completion.fail(stop[0], error)
        self._by_request.pop(completion.request.request_id, None)
        if not completion.group.num_unfinished:
            completion.group.finished_time = self._clock()

    def group_of(self, request_id: str | None) -> RequestGroup | None:
        """Return the group with this id, or of the scheduler's request with it; None for an unknown one."""
        completion = self._by_request.get(request_id or "")
        return self.groups.get(request_id or "") if completion is None else completion.group

    def remove(self, outputs: Iterable[RequestOutput]) -> None:
        """Forget the groups whose final outputs were reported."""
        for output in outputs:
            if output.finished:
                self.groups.pop(output.request_id, None)

    def lora_ids(self) -> set[int]:
        """Return the numbers of the groups' adapters."""
        return {group.lora_id for group in self.groups.values()}

    def unfinished(self) -> list[Completion]:
        """Return the completions that a step may add to, all of which have requests in the scheduler."""
        found: list[Completion] = []
        for group in self.groups.values():
            later = set(group.siblings)
            found += [c for c in group.completions if c.finish_reason is None and c not in later]
        return found

    def rewind(self) -> list[RequestOutput]:
        """Continue, after a failure anywhere in a step and with every unfinished request waiting, from their tokens.

        Return the outputs of groups whose completions have all ended.
        """
        for last in self._by_row:
            if last is not None:
                self._leave(last)
        self._by_row[:] = [None] * len(self._by_row)
        self._read_from[:] = 0
        self._by_request = {}
        for group in self.groups.values():
            for completion in group.completions:
                self._by_request[completion.request.request_id] = completion
            group.num_unfinished = sum(completion.finish_reason is None for completion in group.completions)
        for completion in self.unfinished():
            try:
                completion.rewind()
            except MemoryError:
                raise
            except Exception as error:  # the grammar's or the detokenizer's
                completion.group.siblings = []  # they compute the prompt themselves
                self.end(completion, error)
        return [group.final() for group in self.groups.values() if not group.num_unfinished]

    def process(
        self, rows: I32, before: I32 | None, sampled: Sampled, step: int, num_drafts: I32 | None = None
    ) -> Readings:
        """Read the new tokens of a committed step.

        before: known tokens [B] before the commit; None if every row has exactly one new token. step: its number.
        num_drafts: draft tokens [B] of speculation that it verified, None for a step without any.
        """
        tokens = sampled.token_ids
        may_skip = before is None and not sampled.failures and self._unread.find(rows) is not None
        if may_skip and 1 not in self._is_end.take(tokens).tobytes():  # less code than a reduction of NumPy
            return NOTHING_READ
        for row, found in sampled.prompt_logprobs.items():
            self._completion(row).group.add_prompt_logprobs(found)
        known, read_from = self._states.num_tokens.take(rows), self._read_from.take(rows)
        reads = known >= read_from
        if tokens.ndim == 1:
            reads |= self._is_end.take(tokens)
        else:
            reads |= (self._is_end[tokens] & (tokens >= 0)).any(1)
        accepted = None
        if before is not None:
            reads &= known > before
            if num_drafts is not None:
                accepted = np.maximum(np.minimum(known - before - 1, num_drafts), 0)
                self._num_drafts[:, rows] += np.stack([num_drafts, accepted])
        if sampled.pooled:
            reads[list(sampled.pooled)] = True
        if sampled.failures:
            reads[list(sampled.failures)] = True
        at = reads.nonzero()[0]
        if at.size:
            self._unread.forget()
            return self._read(rows, known, at, sampled, step, accepted)
        num_steps = int((read_from - known).min()) - 1 if len(rows) else 0
        self._unread.keep(rows, True, uses=max(num_steps, 0))
        return NOTHING_READ

    def _read(self, rows: I32, known: I32, at: I64, sampled: Sampled, step: int, accepted: I32 | None) -> Readings:
        now, readings = self._clock(), Readings()
        reported: dict[str, RequestGroup] = {}
        for b, row, num_tokens in zip(at.tolist(), rows[at].tolist(), known[at].tolist(), strict=True):
            completion = self._completion(row)
            group = completion.group
            if group.first_token_time is None:
                group.first_token_time = now
            stop: Stop | Exception | None
            if (failure := sampled.failures.get(b)) is not None:
                stop = failure if isinstance(failure, Exception) else failure(group.request_id, step)
            elif (pooled := sampled.pooled.get(b)) is not None:
                group.pooled, stop = pooled, ([], "stop", None)
            else:
                try:
                    stop = self._advance(completion, row, num_tokens, sampled.logprobs.get(b, ()))
                except MemoryError:
                    raise
                except Exception as error:  # the grammar's or the detokenizer's
                    stop = error
            siblings, group.siblings = group.siblings, []
            readings.ready += [sibling.request for sibling in siblings]
            if stop is not None:
                readings.ended_rows.append(row)
                if accepted is not None and not isinstance(stop, Exception):
                    num_dropped = num_tokens - len(completion.request.prompt) - len(stop[0])
                    # The last token of a step is sampled; the others may be forced, and not counted.
                    self._num_drafts[1, row] -= min(max(num_dropped - 1, 0), int(accepted[b]))
                self.end(completion, stop)
            elif not completion.reads_every_token:
                self._read_from[row] = completion.request.max_len
            if group.stream or not group.num_unfinished:
                reported[group.request_id] = group
        readings.outputs = [self._report(group) for group in reported.values()]
        return readings

    def _advance(self, completion: Completion, row: int, known: int, logprobs: Sequence[TokenLogprobs]) -> Stop | None:
        """Read the new tokens of a row with so many known ones, and return why they end the completion, or None."""
        output = self._states.token_ids[row, len(completion.request.prompt) : known]
        params, text, grammar = completion.params, completion.text, completion.grammar
        reads, token_ids = completion.reads_every_token, completion.transcript.token_ids
        new = len(token_ids) if reads else max(0, len(output) - 1 - self._states.max_num_draft_tokens)
        for i, token in enumerate(output[new:].tolist(), new):
            if reads and i - new < len(logprobs):
                completion.add_logprobs(logprobs[i - new])
            if grammar is not None:
                grammar.accept([token])
            if token in completion.end_ids:
                is_eos = token in self._eos_token_ids and not params.ignore_eos
                return output[: i + 1].tolist(), "stop", None if is_eos else token
            if reads:
                token_ids.append(token)
                if text is not None and text.push([token], may_stop=i + 1 >= params.min_tokens):
                    return output[: i + 1].tolist(), "stop", text.stop
            if grammar is not None and grammar.is_terminated:
                return output[: i + 1].tolist(), "stop", None
        return (output.tolist(), "length", None) if known >= completion.request.max_len else None

    def _report(self, group: RequestGroup) -> RequestOutput:
        return group.result(group.completions) if group.num_unfinished else group.final()

    def _tokens_so_far(self, completion: Completion) -> list[int]:
        request = completion.request
        row, tokens = request.row, request.output
        if row >= 0:
            tokens = self._states.token_ids[row, len(request.prompt) : int(self._states.num_tokens[row])]
        so_far: list[int] = tokens.tolist()
        return so_far

    def _completion(self, row: int) -> Completion:
        completion = self._by_row[row]
        assert completion is not None, f"row {row} was never given to a request"
        return completion
