"""What a step leaves of its samples: random lives of requests as lists, with chunks, drafts and two steps in flight."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from batch_rig import every_backend, states_and_buffers, states_of

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequest, advance, discard_mask, prepare_inputs, resolve

R, M, D, VOCAB = 5, 48, 3, 50


@dataclass(eq=False)
class Request:
    rid: str
    tokens: list[int]
    computed: int = 0
    in_flight: int = 0  # tokens that the steps in flight add at most
    accepted: int = 1
    live: bool = True


@dataclass
class Entry:
    """A request of a step: c computed and n scheduled tokens, k of them drafts."""

    request: Request
    c: int
    n: int
    k: int
    samples: bool = False  # decided when the step is advanced


@dataclass
class Step:
    entries: list[Entry]
    batch: InputBatch
    padded: int
    advanced: bool = False


class Lives:
    def __init__(self, backend: str, seed: int) -> None:
        self.rng, self.backend = random.Random(seed), backend
        self.states = states_of(KVGroup(M), rows=R, length=M, vocab_size=VOCAB, drafts=D)
        self.buffers = [InputBuffers.for_states(self.states, 200) for _ in range(2)]
        self.requests: list[Request] = []
        self.count = 0

    def arrive(self) -> None:
        if len(self.requests) < R:
            self.count += 1
            tokens = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 12))]
            self.requests.append(Request(f"r{self.count}", tokens))
            self.states.add_request(NewRequest(f"r{self.count}", tokens, [[self.count]]))

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        request.live = False
        assert self.states.remove_request(request.rid)

    def prepare(self) -> Step:
        entries, drafts = [], {}
        for r in self.rng.sample(self.requests, len(self.requests)):
            rest = len(r.tokens) + r.in_flight - r.computed
            if rest < 1 or self.rng.random() < 0.15:
                continue
            n = self.rng.choice([rest, rest, self.rng.randint(1, rest)])
            k = self.rng.randint(0, D) if n == rest else 0
            entries.append(Entry(r, r.computed, n + k, k))
            if k:
                drafts[r.rid] = [self.rng.randrange(VOCAB) for _ in range(k)]
        self.buffers.reverse()
        padded = self.rng.randint(len(entries), R)
        plan = {e.request.rid: e.n for e in entries}
        batch = prepare_inputs(
            self.states, plan, self.buffers[0], draft_tokens=drafts, pad_to=(None, padded), backend=self.backend
        )
        return Step(entries, batch, padded)

    def advance(self, step: Step) -> None:
        advance(self.states, step.batch)
        step.advanced = True
        for e in step.entries:
            r = e.request
            e.samples = e.c + e.n - e.k == len(r.tokens) + r.in_flight
            r.computed, r.in_flight = e.c + e.n, r.in_flight + (1 + e.k if e.samples else 0)

    def sample(self, step: Step, ahead: Step | None) -> dict[str, list[int]]:
        """Up to k + 1 tokens each; none at all now and then, where no later step counts on one."""
        waited_for = {e.request for e in ahead.entries} if ahead else set()
        sampled = {}
        for e in step.entries:
            none = e.request not in waited_for and self.rng.random() < 0.2
            chunk = e.c + e.n - e.k < len(e.request.tokens)
            count = 0 if none else 1 if chunk else self.rng.randint(1, e.k + 1)
            sampled[e.request.rid] = [self.rng.randrange(VOCAB) for _ in range(count)]
        return sampled

    def commit(self, step: Step, sampled: dict[str, list[int]]) -> None:
        width = max([1, *map(len, sampled.values())])
        table = np.full((len(step.entries), width), -1, np.int32)
        for b, e in enumerate(step.entries):
            table[b, : len(sampled[e.request.rid])] = sampled[e.request.rid]
        known = {rid: s for rid, s in sampled.items() if any(e.request.rid == rid for e in step.entries)}
        self.states.commit(step.batch, known if self.rng.random() < 0.5 else table)
        for e in step.entries:
            r, new = e.request, sampled[e.request.rid]
            if not r.live:
                continue
            samples = e.samples if step.advanced else e.c + e.n - e.k == len(r.tokens)
            if not step.advanced:
                r.computed = e.c + e.n
            r.accepted = 1
            if samples:
                r.computed -= e.k - max(len(new) - 1, 0)
                r.in_flight -= 1 + e.k if step.advanced else 0
                r.accepted = max(len(new), 1)
                r.tokens += new

    # -- what has to hold ------------------------------------------------------------------------------------------

    def check_mask(self, step: Step) -> None:
        """The sample is discarded where known tokens are left, and where the request is gone."""
        want = []
        for e in step.entries:
            left = e.c + e.n - e.k < len(e.request.tokens) + e.request.in_flight
            want.append(left or not e.request.live)
        assert discard_mask(step.batch).tolist() == want + [True] * (step.padded - len(want))

    def check_states(self) -> None:
        for name, free in (("num_accepted_tokens", 1), ("num_computed_tokens", 0), ("num_placeholders", 0)):
            attribute = {"num_accepted_tokens": "accepted", "num_placeholders": "in_flight"}.get(name, "computed")
            want = [free] * R
            for r in self.requests:
                want[self.states.row_of(r.rid)] = getattr(r, attribute)
            assert getattr(self.states, name).tolist() == want, name
        for r in self.requests:
            row = self.states.row_of(r.rid)
            assert self.states.token_ids[row, : self.states.num_tokens[row]].tolist() == r.tokens

    def live(self, steps: int) -> None:
        ahead = None
        for _ in range(steps):
            if ahead is None:
                for r in [r for r in self.requests if len(r.tokens) > M - 3 * (D + 2)]:
                    self.remove(r)
                self.arrive()
                step = self.prepare()
            else:
                step, ahead = ahead, None
                resolve(step.batch)
                for e in step.entries:
                    e.c = e.request.computed if e.request.live else 0
            self.check_mask(step)
            longest = max([len(r.tokens) + r.in_flight for r in self.requests], default=0)
            if self.rng.random() < 0.6 and longest <= M - 3 * (D + 2):
                self.advance(step)
                self.check_states()
                ahead = self.prepare()
                self.check_mask(ahead)
            sampled = self.sample(step, ahead)
            if self.requests and self.rng.random() < 0.1:
                self.remove(self.rng.choice(self.requests))
                if ahead is None:
                    self.check_mask(step)
            self.commit(step, sampled)
            self.check_states()
            if self.rng.random() < 0.1 and ahead is None:
                self.states.swap_rows(*self.rng.sample(range(R), 2))
                self.check_states()


@every_backend
@pytest.mark.parametrize("seed", range(12))
def test_accepted_counts_and_discarded_samples_of_random_lives_are_those_of_the_lists(backend, seed):
    Lives(backend, seed).live(60)


@every_backend
def test_a_sample_counts_from_the_last_known_token_on(backend):
    """Chunks of a prompt of 5: the first two are discarded; then drafts, of which two, none and all are accepted."""
    states, buffers = states_and_buffers(KVGroup(M), rows=2, length=M, vocab_size=VOCAB, drafts=2, tokens=16)
    states.add_request(NewRequest("other", [1], [[1]]))
    states.add_request(NewRequest("a", [1, 2, 3, 4, 5], [[2]]))
    assert states.num_accepted_tokens.tolist() == [1, 1]
    steps = [  # scheduled, drafts, sampled: is the sample discarded, how many count
        (2, [], [9], True, 1),
        (2, [], [], True, 1),
        (1, [], [6], False, 1),
        (3, [7, 8], [7, 8, 9], False, 3),
        (3, [7, 8], [5], False, 1),
        (2, [7], [7, 4], False, 2),
        (1, [], [], False, 1),
    ]
    for n, drafts, sampled, discarded, counted in steps:
        batch = prepare_inputs(
            states, {"a": n}, buffers, draft_tokens={"a": drafts} if drafts else None, backend=backend
        )
        assert discard_mask(batch).tolist() == [discarded]
        states.commit(batch, {"a": sampled})
        assert states.num_accepted_tokens.tolist() == [1, counted]
    states.remove_request("a")
    assert states.num_accepted_tokens.tolist() == [1, 1]
