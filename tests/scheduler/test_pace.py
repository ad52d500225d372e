"""The bound on prompt tokens of steps in which other requests stream, from times that the tests choose."""

import numpy as np
import pytest
from scheduler_rig import Rig

from foreword.batch import KVGroup
from foreword.scheduler.pace import LEAST, MOST_MIXED, PromptPace


class Machine:
    """Steps take decode · (overhead + d) + prompt · p seconds, sometimes much longer."""

    def __init__(self, overhead: float, prompt: float, *, noise: float = 0.0) -> None:
        self.overhead, self.prompt, self.noise = overhead, prompt, noise
        self.slowness, self.rng = 1.0, np.random.default_rng(0)

    def seconds(self, d: int, p: int) -> float:
        return 1e-3 * self.slowness * (self.overhead + d + self.prompt * p)

    def measured(self, d: int, p: int) -> float:
        hiccup = 20 if self.rng.random() < self.noise / 10 else 1
        return hiccup * self.seconds(d, p) * float(np.exp(self.noise * self.rng.standard_normal()))

    def serve(self, pace: PromptPace, d: int, num_steps: int) -> None:
        """Run steps with d tokens that decode; every other one has prompts."""
        for step in range(num_steps):
            p = pace.limit(d) if step % 2 else 0
            pace.measure(d, p, self.measured(d, p))

    def share(self, pace: PromptPace, d: int) -> float:
        """Return the share of prompts in the time of the largest step with d tokens that decode."""
        return 1 - self.seconds(d, 0) / self.seconds(d, pace.limit(d))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize(("overhead", "prompt"), [(1, 1), (4, 0.9), (20, 0.3), (200, 0.1)])
@pytest.mark.parametrize("d", [16, 64])
def test_prompts_get_their_share_of_the_time(share, overhead, prompt, d):
    machine, pace = Machine(overhead, prompt), PromptPace(share)
    machine.serve(pace, d, 60)
    assert machine.share(pace, d) == pytest.approx(share, rel=0.1)


def test_it_holds_with_noise_and_after_the_machine_has_become_slower_or_faster():
    machine, pace = Machine(10, 0.5, noise=0.2), PromptPace(0.5)
    for machine.slowness in (1.0, 3.0, 0.5):
        machine.serve(pace, 16, 100)
        assert 0.25 < machine.share(pace, 16) < 0.6


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_nearly_no_step_with_prompts_takes_more_than_its_share(noise):
    machine, pace, relative = Machine(10, 0.5), PromptPace(0.5), []
    for step in range(4000):
        p = pace.limit(16) if step % 2 else 0
        seconds = machine.seconds(16, p) * float(np.exp(noise * machine.rng.standard_normal()))
        pace.measure(16, p, seconds)
        if p and step > 200:
            relative.append(seconds / machine.seconds(16, 0))
    assert 1.95 < np.percentile(relative, 99) < 2.1
    assert np.mean(relative) > 1.95 / (1 + 4 * noise)


def test_it_holds_if_no_step_is_without_prompts():
    machine, pace = Machine(10, 0.5), PromptPace(0.5)
    machine.serve(pace, 16, 20)
    machine.slowness = 4.0
    assert pace.limit(16) > 0
    for _ in range(400):
        pace.measure(16, p := pace.limit(16), machine.seconds(16, p))
    assert machine.share(pace, 16) == pytest.approx(0.5, abs=0.1)


def test_after_many_steps_with_prompts_one_has_none():
    rig, _ = _rig()
    rig.add("b", 250, max_len=256)
    rig.add("c", 250, max_len=256)
    counts = []
    for _ in range(MOST_MIXED + 2):
        rig.step()
        counts.append(rig.plan.num_prompt_tokens)
        d, p = rig.plan.num_tokens - rig.plan.num_prompt_tokens, rig.plan.num_prompt_tokens
        rig.scheduler.measure(rig.plan, 1.0 * d + 100.0 * p)
    assert [count > 0 for count in counts] == MOST_MIXED * [True] + [False, True]


def test_it_follows_the_number_of_requests_that_decode():
    machine, pace = Machine(10, 0.5), PromptPace(0.5)
    for d in (1, 8, 40, 3):
        machine.serve(pace, d, 40)
        assert machine.share(pace, d) == pytest.approx(0.5, abs=0.1)


def test_prompts_alone_are_a_first_estimate_until_a_step_has_both():
    pace = PromptPace(0.5)
    pace.measure(0, 1000, 1.0)
    pace.measure(1, 0, 0.1)
    assert pace.limit(1) == pytest.approx(100, abs=10)
    pace.measure(1, 100, 0.3)
    measured = pace.limit(1)
    assert LEAST < measured < 90
    pace.measure(0, 1000, 1.0)
    assert pace.limit(1) == measured


def test_times_that_say_nothing_change_nothing_and_prompts_always_go_on():
    pace = PromptPace(0.5)
    before = pace.limit(3)
    pace.measure(3, 0, 0.0)
    pace.measure(3, 5, -1.0)
    assert pace.limit(3) == before
    for _ in range(100):
        pace.measure(3, 5, 100.0)
        pace.measure(3, 0, 1e-9)
    assert pace.limit(3) == LEAST
    assert not PromptPace(1.0).is_limited


def test_a_first_step_that_was_stopped_for_years_leaves_a_bound():
    pace = PromptPace(0.5)
    pace.measure(0, 10, 1e9)
    for seconds in (1e-9, 0.01, 0.01):
        pace.measure(3, 0, seconds)
    pace.measure(3, 5, 0.02)
    assert pace.limit(3) >= LEAST


def _rig(**config) -> tuple[Rig, int]:
    """Return a rig with a streaming request that decodes, and the most prompt tokens beside its token."""
    rig = Rig(blocks=200, M=256, **({"max_num_batched_tokens": 256} | config))
    rig.add("a", 3, max_len=256, streams=True)
    rig.step()
    limit = rig.scheduler.pace.limit(1)
    assert 4 < limit < 50
    return rig, limit


def test_a_prompt_is_divided_while_another_request_streams():
    rig, limit = _rig()
    rig.add("b", 2 * limit + 3, max_len=256)
    assert rig.step() == {"a": 1, "b": limit}
    assert (rig.plan.num_tokens, rig.plan.num_prompt_tokens) == (limit + 1, limit)
    assert rig.step() == {"a": 1, "b": limit}
    assert rig.step() == {"a": 1, "b": 3}
    assert rig.step() == {"a": 1, "b": 1}
    assert rig.plan.num_prompt_tokens == 0


def test_a_prompt_is_whole_if_nothing_streams():
    rig = Rig(blocks=200, M=256, max_num_batched_tokens=256)
    rig.add("a", 3, max_len=256)
    rig.step()
    rig.add("b", 100, max_len=256, streams=True)
    rig.add("c", 90, max_len=256, streams=True)
    assert rig.step() == {"a": 1, "b": 100, "c": 90}


def test_prompts_share_the_bound_in_order_and_no_other_is_admitted():
    rig, limit = _rig()
    rig.add("b", limit + 2)
    rig.add("c", limit, max_len=256)
    rig.add("d", 5)
    assert rig.step() == {"a": 1, "b": limit}
    assert rig.why("c").startswith("token_budget left=0")
    assert rig.step() == {"a": 1, "b": 2, "c": limit - 2}
    assert rig.step() == {"a": 1, "b": 1, "c": 2, "d": 5}


def test_a_prompt_that_was_begun_alone_continues_in_parts_when_another_request_streams():
    rig = Rig(blocks=200, M=256, max_num_batched_tokens=64)
    rig.add("a", 3, max_len=256, streams=True)
    rig.add("b", 150, max_len=256)
    assert rig.step() == {"a": 3, "b": 61}
    limit = rig.scheduler.pace.limit(1)
    assert rig.step() == {"a": 1, "b": limit}
    rig.scheduler.remove("a")
    assert rig.step() == {"b": 64}


def test_a_row_after_a_prompt_in_the_order_of_admission_decodes_in_each_step():
    rig = Rig(blocks=200, M=256, max_num_batched_tokens=64, long_prefill_threshold=40)
    rig.add("long", 200, max_len=256)
    rig.add("a", 3, max_len=256, streams=True)
    assert rig.step() == {"long": 40, "a": 3}
    for _ in range(5):
        assert rig.step() == {"long": rig.scheduler.pace.limit(1), "a": 1}


def test_the_measured_times_change_the_bound():
    rig, limit = _rig()
    rig.step()
    rig.scheduler.measure(rig.plan, 1.0)
    rig.add("b", 200, max_len=256)
    rig.step()
    rig.scheduler.measure(rig.plan, 1.1)
    assert rig.step()["b"] > limit


def test_without_chunks_a_prompt_is_not_divided():
    rig = Rig(blocks=200, M=256, max_num_batched_tokens=256, chunked_prefill=False)
    rig.add("a", 3, max_len=256, streams=True)
    rig.step()
    rig.add("b", 100, max_len=256)
    assert rig.step() == {"a": 1, "b": 100}


def test_a_span_is_computed_whole_although_it_is_longer():
    rig, limit = _rig()
    spans = np.array([[2, 2 + 3 * limit]], np.int32)
    rig.add("b", 4 * limit, max_len=256, spans=spans)
    assert rig.step() == {"a": 1, "b": 2}
    assert rig.step() == {"a": 1, "b": 3 * limit}


@pytest.mark.parametrize("start", [0, 8])
def test_a_request_whose_next_tokens_are_a_longer_span_is_admitted_and_no_other_with_it(start):
    """It begins with the span, or the cache has all tokens before it."""
    rig, limit = _rig(cache={"prefix_caching": True})
    if start:
        rig.add("x", start, max_len=start + 1, first=50)
        rig.step()
    rig.add("b", 5 * limit, max_len=256, first=50, spans=np.array([[start, start + 3 * limit]], np.int32))
    rig.add("c", 4, max_len=256)
    assert rig.step() == {"a": 1, "b": 3 * limit}
    assert rig.plan.num_prompt_tokens == 3 * limit
    assert rig.why("c") == "token_budget left=0 need=4"
    assert rig.step() == {"a": 1, "b": limit}


def test_a_span_that_the_step_has_no_room_for_waits():
    rig, limit = _rig(max_num_batched_tokens=64)
    rig.add("b", 2, max_len=256)
    rig.add("c", 70, max_len=256, spans=np.array([[0, 62]], np.int32))
    assert rig.step() == {"a": 1, "b": 2}
    assert rig.why("c") == f"token_budget left={limit - 2} need=70"
    rig.scheduler.remove("b")
    assert rig.step() == {"a": 1, "c": 62}


def test_all_tokens_of_a_prompt_alone_are_counted_beyond_the_threshold():
    rig = Rig(blocks=200, M=256, max_num_batched_tokens=64, long_prefill_threshold=8)
    rig.add("a", 100, max_len=256)
    for expected in (64, 36):
        assert rig.step() == {"a": expected}
        assert rig.plan.num_prompt_tokens == expected


def test_a_resumed_request_computes_its_tokens_in_parts():
    rig = Rig(blocks=18, M=64, reserve_full_prompt=False, max_num_batched_tokens=64)
    rig.add("a", 20, max_len=64, streams=True)
    b = rig.add("b", 28, max_len=60)
    while not b.num_preemptions:
        rig.step()
    for _ in range(100):
        if rig.step().get("b", 0) > 1:
            break
    assert rig.plan.num_prompt_tokens <= max(rig.scheduler.pace.limit(1), 64 * ("a" not in rig.states))


def test_a_recurrent_group_has_the_same_bound():
    rig = Rig(blocks=200, M=256, groups=[KVGroup(4), KVGroup(4, recurrent=True)], max_num_batched_tokens=256)
    rig.add("a", 3, max_len=256, streams=True)
    rig.step()
    limit = rig.scheduler.pace.limit(1)
    rig.add("b", 3 * limit, max_len=256)
    total = 0
    while total < 3 * limit:
        n = rig.step()["b"]
        assert 0 < n <= limit
        total += n
