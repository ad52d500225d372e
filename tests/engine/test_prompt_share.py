"""Prompts beside requests that stream: how long steps take on a clock of the test, and that the tokens are the same."""

import random

import pytest
from engine_rig import OnStep, make_engine, token_ids

from foreword.batch import SamplingParams
from foreword.errors import ConfigError


class Clock:
    """The time that steps take: 6 for each step, 1 per token of a request that decodes, 0.4 per prompt token."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, []

    def __call__(self) -> float:
        return self.now

    def step(self, plan, batch) -> None:
        num_decoding = plan.num_tokens - plan.num_prompt_tokens
        assert plan.num_prompt_tokens == plan.num_scheduled[[row in plan.prefilling for row in plan.rows]].sum()
        self.steps.append((num_decoding, plan.num_prompt_tokens))
        self.now += 6.0 + num_decoding + 0.4 * plan.num_prompt_tokens


def serve(*, stream: bool, **config):
    """Serve two requests, and a long prompt after every sixth step. Return their tokens, and the steps."""
    clock, rng = Clock(), random.Random(1)
    engine = make_engine(
        M=256, blocks=400, max_num_batched_tokens=200, clock=clock, observers=[OnStep(clock.step)], **config
    )
    params, outputs = SamplingParams(temperature=0.7, seed=5, max_tokens=90, ignore_eos=True), {}
    for name in "ab":
        engine.add_request(name, [rng.randrange(30) for _ in range(7)], params, stream=stream)
    for count in range(1000):
        if count % 6 == 3 and count < 80:
            prompt = [rng.randrange(30) for _ in range(rng.randrange(40, 150))]
            engine.add_request(str(count), prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        if not engine.has_work:
            break
    engine.close()
    return token_ids(outputs), clock.steps


@pytest.mark.one_in(3)
@pytest.mark.parametrize("config", [{}, {"speculation": "ngram"}, {"async_scheduling": True}], ids=str)
def test_steps_take_about_twice_as_long_with_prompts_and_the_tokens_are_the_same(config):
    tokens, steps = serve(stream=True, **config)
    assert tokens == serve(stream=True, prompt_time_share=1.0, **config)[0]
    mixed = [(d, p) for d, p in steps if d and p]
    assert len(mixed) > 20
    assert max(0.4 * p / (6 + d) for d, p in mixed[10:]) < 1.4
    assert sum(0.4 * p / (6 + d) for d, p in mixed) / len(mixed) > 0.6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("config", [{"stream": False}, {"stream": True, "prompt_time_share": 1.0}], ids=str)
def test_prompts_are_whole_if_nobody_reads_along_or_without_a_limit(config):
    _, steps = serve(**config)
    assert max(p for d, p in steps if d) > 100


def test_a_share_is_a_positive_part():
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="prompt_time_share"):
            make_engine(prompt_time_share=share)
