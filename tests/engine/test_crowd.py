"""A request has the same tokens and log-probabilities alone or with others, chunked, cached, preempted or not."""

from random import Random

import pytest
from engine_rig import Guesser, make_engine, run
from hypothesis import given
from hypothesis import strategies as st

from foreword.batch import KVGroup, SamplingParams
from foreword.engine.speculation import SpeculationConfig

GROUPS = {
    "full": [KVGroup(4)],
    "window": [KVGroup(4, sliding_window=7)],
    "hybrid": [KVGroup(4), KVGroup(4, sliding_window=6), KVGroup(4, sliding_window=6)],
    "states": [KVGroup(4, recurrent=True)],
    "fine states": [KVGroup(2), KVGroup(1, recurrent=True)],
    "hybrid states": [KVGroup(4), KVGroup(4, sliding_window=6), KVGroup(4, recurrent=True), KVGroup(2, recurrent=True)],
}
M = 48


def most_blocks(group: KVGroup) -> int:
    """Blocks of one request at most."""
    return 1 if group.recurrent else M // group.block_size + 1


def some_params(random: Random) -> SamplingParams:
    return SamplingParams(
        min_p=random.choice([0.0, 0.0, 0.1]),
        typical_p=random.choice([1.0, 1.0, 0.7]),
        top_n_sigma=random.choice([0.0, 0.0, 1.5]),
        xtc_probability=random.choice([0.0, 0.0, 0.5]),
        dry_multiplier=random.choice([0.0, 0.0, 1.5]),
        dry_sequence_breakers=random.choice([None, ("b", "ef")]),
        logit_bias=random.choice([None, None, {3: 2.0, 4: -1.0}]),
        bad_words=random.choice([(), (), ("c", "de")]),
        allowed_token_ids=random.choice([None, None, None, range(1, 20)]),
        temperature=random.choice([0.0, 0.7, 1.3]),
        top_p=random.choice([1.0, 0.8]),
        top_k=random.choice([0, 5]),
        seed=random.randrange(1000),
        max_tokens=random.randint(1, 14),
        logprobs=random.choice([None, 1]),
        repetition_penalty=random.choice([1.0, 1.3]),
        frequency_penalty=random.choice([0.0, 0.4]),
        stop=random.choice([(), "ab", ("q", "xyz")]),
        min_tokens=random.choice([0, 1]),
        n=random.choice([1, 1, 1, 3]),
    )


def some_prompts(random: Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings, also inside a block."""
    stem = [random.randint(1, 29) for _ in range(30)]
    return [
        stem[: random.randint(0, 28)] + [random.randint(1, 29) for _ in range(random.randint(1, 4))]
        for _ in range(count)
    ]


def outcome(output) -> list[tuple]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]


def aborted_after(count: int, whole: tuple, text: str) -> tuple:
    """Return what an abort leaves of an outcome: its first tokens, and the text that was certain by then."""
    tokens, _, _, _, logprobs = whole
    return tokens[:count], text, "abort", None, None if logprobs is None else logprobs[:count]


@pytest.mark.long
@given(st.integers(0, 2**32), st.sampled_from(sorted(GROUPS)))
def test_other_requests_change_nothing(seed: int, kind: str):
    random = Random(seed)
    groups = GROUPS[kind]
    work = [(p, some_params(random)) for p in some_prompts(random, random.randint(1, 8))]
    alone = []
    for prompt, params in work:
        engine = make_engine(
            groups=groups, M=M, blocks=60, prefix_caching=False, max_num_batched_tokens=64, check="off"
        )
        engine.add_request("x", prompt, params)
        alone.append(outcome(run(engine)["x"]))
    speculation = random.choice(
        [None, SpeculationConfig(min_match=1), SpeculationConfig(method="draft_model", model="guesser")]
    )
    if any(g.recurrent for g in groups):
        speculation = None
    engine = make_engine(
        groups=groups,
        M=M,
        blocks=1 + sum(most_blocks(g) for g in groups) + random.randint(1, 20),
        eos=(),
        max_num_seqs=random.randint(1, 6),
        max_num_batched_tokens=random.randint(1, 40),
        policy=random.choice(["fcfs", "shortest-first", "priority", "fair"]),
        long_prefill_threshold=random.choice([0, 3]),
        reserve_full_prompt=random.random() < 0.5,
        prefix_caching=random.random() < 0.8,
        speculation=speculation,
        async_scheduling=random.random() < 0.6,
        drafter=Guesser if speculation and speculation.method == "draft_model" else None,
        check="full" if random.random() < 0.25 else "off",
    )
    outputs: dict[str, object] = {}
    pending = list(enumerate(work))
    while pending or engine.has_work:
        while pending and random.random() < 0.5:
            i, (prompt, params) = pending.pop(0)
            priority = random.randint(0, 2)
            engine.add_request(
                str(i), prompt, params, stream=random.random() < 0.3, priority=priority, owner=str(i % 3)
            )
            if random.random() < 0.4:
                engine.add_request(f"aborted {i}", prompt, params)
        if random.random() < 0.2 and (aborted := engine.abort(f"aborted {random.randrange(len(work))}")):
            outputs[aborted.request_id] = aborted
        outputs |= {out.request_id: out for out in engine.step()}
    engine.close()
    for i, wanted in enumerate(alone):
        assert outcome(outputs[str(i)]) == wanted
        if f"aborted {i}" in outputs:
            for got, whole in zip(outcome(outputs[f"aborted {i}"]), wanted, strict=True):
                assert got == whole or got == aborted_after(len(got[0]), whole, got[1])
    assert engine.cache.pool.num_used == 0


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", sorted(GROUPS))
def test_a_twentyfold_oversubscription_ends_every_request_and_leaks_nothing(kind: str):
    groups = GROUPS[kind]
    blocks = 1 + sum(most_blocks(g) for g in groups)
    engine = make_engine(groups=groups, M=M, blocks=blocks, max_num_seqs=8, reserve_full_prompt=False, watermark=0.0)
    free = engine.cache.pool.num_free
    random = Random(7)
    count = 20 if any(g.recurrent for g in groups) else 40
    prompts = some_prompts(random, count)  # up to 46 tokens with their outputs, on a pool for one or two
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=14))
    outputs = run(engine)
    assert len(outputs) == count
    assert all(out.outputs[0].finish_reason == "length" for out in outputs.values())
    assert engine.cache.pool.num_free == free
    preempted = any(out.metrics.num_preemptions for out in outputs.values())
    assert preempted == (kind != "states")  # a state does not grow


def test_hundreds_of_aborts_at_any_moment_leak_nothing():
    engine = make_engine(blocks=40, max_num_seqs=6, M=M)
    free = engine.cache.pool.num_free
    random = Random(3)
    prompts = some_prompts(random, 800)
    ended = 0
    live: list[str] = []
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(seed=i, max_tokens=8, n=random.choice([1, 2])))
        live.append(str(i))
        if random.random() < 0.7:
            victim = live.pop(random.randrange(len(live)))
            out = engine.abort(victim)
            ended += out is not None
        if i % 5 == 0:
            ended += len(done := engine.step())
            live = [name for name in live if name not in {d.request_id for d in done}]
    for name in live:
        ended += engine.abort(name) is not None
    assert ended == 800
    assert not engine.has_work
    assert engine.cache.pool.num_free == free
    assert engine.cache.reset()
    assert len(engine.cache.tree) == 0


def test_two_engines_in_one_process_are_independent():
    first, second = make_engine(), make_engine()
    for engine in (first, second):
        engine.add_request("a", [1, 2, 3], SamplingParams(seed=1, max_tokens=9))
    one, two = [], []
    while first.has_work or second.has_work:
        one += first.step()
        two += second.step()
    assert outcome(one[0]) == outcome(two[0])
