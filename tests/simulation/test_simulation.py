"""Simulation: traces read, statistics right, and runs whose outcome can be worked out by hand."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from foreword.batch import KVGroup, RequestStates
from foreword.cache import KVCacheManager
from foreword.errors import ConfigError
from foreword.scheduler import Request, Scheduler, SchedulerConfig
from foreword.simulation import (
    Arrival,
    CostModel,
    Durations,
    Fleet,
    LatencyHistogram,
    TimeSeries,
    Trace,
    read_trace,
    simulate,
)


def run(arrivals, **options):
    config = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=4, watermark=0.0, **options.pop("config", {}))
    cost = CostModel(step=1.0, token=0.01, context=0.0)
    settings = {"max_model_len": 200, "num_blocks": 101, "block_size": 4} | options
    return simulate(arrivals, Fleet(config=config, cost=cost, **settings))


def test_one_request_takes_the_time_of_the_cost_model():
    report = run([Arrival(5.0, 100, 3)])
    assert (report.num_requests, report.num_steps, report.num_output_tokens) == (1, 3, 3)
    assert report.seconds == pytest.approx(5.0 + 2.0 + 1.01 + 1.01)
    assert report.time_to_first_token.percentiles(50, 99) == [2.0, 2.0]
    assert report.time_per_output_token.percentile(50) == pytest.approx(1.01, rel=1e-6)
    assert report.end_to_end.percentile(50) == pytest.approx(4.02, rel=1e-6)
    assert report.time_between_tokens.percentile(50) == pytest.approx(1.01, rel=0.012)
    assert report.num_leaked_blocks == 0


def test_a_shared_prefix_is_not_computed_twice():
    arrivals = [Arrival(0.0, 100, 1, (7,)), Arrival(10.0, 100, 1, (7,)), Arrival(20.0, 100, 1, (8,))]
    report = run(arrivals)
    assert report.num_cached_tokens == 96
    assert report.hit_rate == pytest.approx(0.32)
    assert run(arrivals, prefix_caching=False).num_cached_tokens == 0


@pytest.mark.parametrize(("share", "longest"), [(0.2, 1.01 + 0.25), (1.0, 1.01 + 0.9)])
def test_prompts_take_their_share_of_the_cost_of_a_step(share, longest):
    report = run([Arrival(0.0, 4, 100), Arrival(10.0, 90, 2)], config={"prompt_time_share": share})
    assert report.time_between_tokens.percentile(99.9) == pytest.approx(longest, rel=0.012)


def test_prompts_beside_a_request_that_does_not_stream_are_whole(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    first = {"timestamp": 0, "input_length": 4, "output_length": 100, "stream": False}
    lines.write_text("\n".join(json.dumps(row) for row in (first, {**first, "timestamp": 10_000, "input_length": 90})))
    arrivals = list(read_trace(lines).requests(2))
    assert [arrival.streams for arrival in arrivals] == [False, False]
    report = run(arrivals, config={"prompt_time_share": 0.2})
    assert report.time_between_tokens.percentile(99.9) == pytest.approx(1.01 + 0.9, rel=0.012)


def test_preempted_requests_wait_and_finish():
    report = run([Arrival(0.0, 50, 100) for _ in range(4)], config={"reserve_full_prompt": False}, num_blocks=60)
    assert report.num_output_tokens == 400
    assert report.num_preemptions > 0
    assert report.num_leaked_blocks == 0


def test_the_same_load_has_the_same_outcome():
    random = np.random.default_rng(0)
    arrivals = [Arrival(t / 5, int(random.integers(1, 90)), int(random.integers(1, 50))) for t in range(60)]
    reports = [run(arrivals, num_blocks=80) for _ in range(2)]
    assert reports[0].seconds == reports[1].seconds
    assert reports[0].memory_use.points == reports[1].memory_use.points


def test_a_trace_repeats_with_prompts_of_its_own():
    trace = Trace((Arrival(0.0, 600, 2, (0, 1)), Arrival(4.0, 512, 1, (0,))))
    requests = list(trace.requests(5, speed=2.0))
    assert [a.time for a in requests[:3]] == [0.0, 2.0, pytest.approx(2.0005)]
    assert [a.hash_ids for a in requests] == [(0, 1), (0,), (2, 3), (2,), (4, 5)]
    assert requests[0].names(0, 600, 600, 8).tolist() == [0] * 64 + [1] * 11


def test_copies_run_at_the_same_time_with_prompts_of_their_own():
    trace = Trace((Arrival(0.0, 600, 2, (0, 1)), Arrival(4.0, 512, 1, (0,)), Arrival(6.0, 5, 1)))
    found = list(trace.requests(9, copies=3))
    assert [a.time for a in found] == pytest.approx([0, 0, 0, 0.001, 2, 2.001, 4, 4.001, 6], abs=1e-9)
    assert [a.hash_ids for a in found] == [(0, 1), (2,), (), (10, 11), (), (8, 9), (0,), (10,), ()]
    with pytest.raises(ConfigError, match="copies=0"):
        trace.requests(1, copies=0)


def test_both_trace_formats_are_read(tmp_path: Path):
    table = tmp_path / "a.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                     "2023-11-16 18:15:50.6805900,396,0\n")  # fmt: skip
    assert read_trace(table).arrivals == (Arrival(0.0, 374, 44), Arrival(4.0, 396, 1))
    lines = tmp_path / "b.jsonl"
    lines.write_text(json.dumps({"timestamp": 1500, "input_length": 9, "output_length": 5, "hash_ids": [3]}) + "\n")
    trace = read_trace(lines)
    assert trace.arrivals == (Arrival(1.5, 9, 5, (3,)),)
    assert trace.max_length == 14
    for broken in (tmp_path / "missing.csv", tmp_path):
        with pytest.raises(ConfigError, match="trace"):
            read_trace(broken)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 3}\n\n{oops\n', 3),
        ("a.jsonl", "[1, 2]\n", 1),
        ("a.jsonl", '{"timestamp": NaN, "input_length": 5, "output_length": 3}\n', 1),
        ("a.jsonl", '{"timestamp": 0, "input_length": -5, "output_length": 3}\n', 1),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": ["x"]}\n', 1),
        ("a.jsonl", '{"timestamp": -1, "input_length": 5, "output_length": 3}\n', 1),
        ("a.jsonl", '{"timestamp": 1e14, "input_length": 5, "output_length": 3}\n', 1),
        ("a.jsonl", '{"timestamp": 0, "input_length": 2147483648, "output_length": 3}\n', 1),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 3, "stream": 1}\n', 1),
        ("a.jsonl", "[" * 100_000, 1),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374\n", 2),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,374,44\n", 2),
        ("a.csv", "when,in,out\n0,1,2\n", 2),
    ],
)
def test_a_line_that_is_not_an_arrival_is_named(tmp_path: Path, name: str, text: str, line: int):
    broken = tmp_path / name
    broken.write_text(text)
    with pytest.raises(ConfigError, match=f"line {line}:"):
        read_trace(broken)


def test_traces_may_be_out_of_order_and_without_optional_fields(tmp_path: Path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"timestamp": 5000, "input_length": 0, "output_length": 0}\n\n'
                     '{"timestamp": 0, "input_length": 7, "output_length": 2, "hash_ids": null}\n')  # fmt: skip
    assert read_trace(lines).arrivals == (Arrival(0.0, 7, 2), Arrival(5.0, 1, 1))
    table = tmp_path / "a.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16T18:15:50.5Z,4,4\n"
                     "2023-11-16 19:15:46.5000000+01:00,3,3\n")  # fmt: skip
    assert read_trace(table).arrivals == (Arrival(0.0, 3, 3), Arrival(4.0, 4, 4))


def test_pieces_are_alike_only_where_the_trace_says_so():
    known, unknown = Arrival(0.0, 1000, 30, (2**31 - 1, 2**80)), Arrival(0.0, 1000, 30)
    names = [known.names(0, 1000, 1030, 16), known.names(1, 1000, 1030, 16), unknown.names(2, 1000, 1030, 16)]
    names.append(unknown.names(2**31 + 1, 1000, 1030, 16))
    assert all(len(found) == 65 and found.min() >= 0 and found.max() < 2**31 - 1 for found in names)
    for i in range(4):
        for j in range(i):
            alike = np.flatnonzero(names[i] == names[j])
            assert alike.tolist() == (list(range(1000 // 16)) if (i, j) == (1, 0) else [])


def test_a_run_that_cannot_be_is_refused():
    trace = Trace((Arrival(0.0, 5, 2),))
    for speed in (0.0, -1.0, 1e-7, 1e7, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="speed"):
            list(trace.requests(1, speed=speed))
    with pytest.raises(ConfigError, match="max_model_len=1"):
        Fleet(max_model_len=1, num_blocks=9)
    with pytest.raises(ConfigError, match="max_model_len=33: 9 blocks of 4 hold 32 tokens"):
        Fleet(max_model_len=33, num_blocks=9, block_size=4)
    for cost in (-0.1, 1.1e6, float("nan"), float("inf"), "1"):
        with pytest.raises(ConfigError, match=r"must be in \[0, 1e\+06\] seconds"):
            CostModel(token=cost)


def test_a_prompt_takes_no_more_memory_than_its_limit():
    arrival = Arrival(0.0, 2**31 - 1, 1, tuple(range(10**5)))
    tracemalloc.start()
    try:
        names = arrival.names(0, 600, 600, 8)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert names.tolist() == [0] * 64 + [1] * 11


def test_percentiles_of_durations_are_values_of_them():
    values = np.random.default_rng(1).exponential(size=997).astype(np.float32)
    durations, rest = Durations(), Durations()
    for i, value in enumerate(values.tolist()):
        (durations if i % 3 else rest).add(value)
    durations.extend(rest)
    for level in (0.01, 1, 50, 90, 99, 99.9, 100):
        found = durations.percentile(level)
        assert found in values
        assert np.count_nonzero(values <= found) >= level / 100 * 997 > np.count_nonzero(values < found)
    assert np.isnan(Durations().percentiles(50, 99)).all()


def test_the_histogram_keeps_durations_to_a_percent():
    values = np.exp(np.random.default_rng(1).normal(size=5000))
    histogram = LatencyHistogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    for p in (1, 50, 99):
        assert histogram.percentile(p) == pytest.approx(np.percentile(values, p), rel=0.03)
    assert np.isnan(LatencyHistogram().percentile(50))


def test_durations_are_counted_alike_one_by_one_and_together():
    values = 10 ** np.random.default_rng(3).uniform(-7, 7, 400)
    together, single = LatencyHistogram(), LatencyHistogram()
    together.add(values, 3)
    together.add(values[:0])
    for value in values:
        single.add(np.array([value]), 3)
    assert together.counts.tolist() == single.counts.tolist()
    assert together.count == 1200


def test_a_series_stays_small_and_keeps_its_shape():
    series = TimeSeries(size=64)
    for i in range(50_000):
        series.add(i, i / 50_000)
    assert len(series.points) <= 64
    assert series.points[-1][0] == pytest.approx(49_999)
    assert series.plot(4) == "▁▃▅▇"
    assert series.plot(4, top=0.5) == "▂▆██"
    assert series.peak == pytest.approx(1.0, abs=1e-4)


def test_a_series_weighs_values_by_how_long_they_held():
    series = TimeSeries(size=8)
    for time, value in ((0.0, 0.5), (30.0, 1.0), (30.5, 0.0), (100.0, 0.0)):
        series.add(time, value)
    ends, means = np.array(series.points).T
    spans = np.diff(ends, prepend=0.0)
    assert float((means * spans).sum()) == pytest.approx(30 * 0.5 + 0.5 * 1.0)
    assert ends[-1] == 100.0


def test_a_cost_model_is_fitted_to_measured_steps():
    random = np.random.default_rng(2)
    tokens, context = random.integers(1, 2000, 300), random.integers(1, 500_000, 300)
    for truth in (CostModel(3e-3, 2e-5, 1e-8), CostModel(0.0, 2e-5, 1e-8), CostModel(3e-3, 0.0, 0.0)):
        seconds = np.array([truth.seconds(int(t), int(c)) for t, c in zip(tokens, context, strict=True)])
        fit = CostModel.fitted(tokens, context, seconds)
        assert (fit.step, fit.token, fit.context) == pytest.approx((truth.step, truth.token, truth.context), abs=1e-12)
        assert fit.error(tokens, context, seconds) < 1e-9


def test_a_fit_has_no_negative_cost_and_no_close_one_is_better():
    random = np.random.default_rng(4)
    tokens, context = random.integers(1, 200, 40), random.integers(1, 5000, 40)
    seconds = np.maximum(5e-3 + 1e-5 * tokens - 6e-7 * context, 1e-3) * random.uniform(0.8, 1.2, 40)

    def loss(cost: CostModel) -> float:
        said = np.array([cost.seconds(int(t), int(c)) for t, c in zip(tokens, context, strict=True)])
        return float(((said / seconds - 1) ** 2).sum())

    fit = CostModel.fitted(tokens, context, seconds)
    assert min(fit.step, fit.token, fit.context) >= 0
    for _ in range(500):
        step, token, away = random.normal(scale=(1e-3, 1e-6, 1e-8))
        other = CostModel(max(fit.step + step, 0), max(fit.token + token, 0), max(fit.context + away, 0))
        assert loss(fit) <= loss(other) + 1e-9


def test_a_saved_cost_model_is_read_back(tmp_path: Path):
    file = tmp_path / "cost.json"
    CostModel(3e-3, 2e-5, 1e-8).write(file, model="a model")
    assert CostModel.read(file) == CostModel(3e-3, 2e-5, 1e-8)
    assert json.loads(file.read_text())["model"] == "a model"
    for text in ("", "[]", "{}", '{"step": "x", "token": 1, "context": 1}', '{"step": -1, "token": 1, "context": 1}',
                 '{"step": 1e308, "token": 1, "context": 1}', "[" * 100_000, '{"step": true, "token": 1, "context": 1}',
                 '{"step": 0, "token": 0, "context": 0}', '{"step": NaN, "token": 1, "context": 1}'):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"cost\.json"):
            CostModel.read(file)
    with pytest.raises(ConfigError, match="missing"):
        CostModel.read(tmp_path / "missing.json")


@pytest.mark.one_in(7)
@pytest.mark.parametrize("policy", ["fcfs", "shortest-first"])
@pytest.mark.parametrize("load", [1.0, 4.0, 30.0])
def test_steps_simulated_together_have_the_outcome_of_single_ones(
    policy: str, load: float, monkeypatch: pytest.MonkeyPatch
):
    random = np.random.default_rng(5)
    arrivals = [
        Arrival(float(t), int(random.integers(1, 90)), int(random.integers(1, 60)), (int(random.integers(3)),))
        for t in np.cumsum(random.exponential(20.0 / load, 80))
    ]

    def outcome(num_blocks: int, reserve: bool):
        config = {"reserve_full_prompt": reserve, "policy": policy, "max_num_batched_tokens": 40, "max_num_seqs": 4}
        fleet = Fleet(
            max_model_len=200,
            num_blocks=num_blocks,
            block_size=4,
            config=SchedulerConfig(watermark=0.0, **config),
            cost=CostModel(step=0.7, token=0.013, context=0.0011),
        )
        r = simulate(arrivals, fleet)
        histograms = [r.time_between_tokens.counts.tolist()]
        histograms += [d.values.tolist() for d in (r.time_to_first_token, r.time_per_output_token, r.end_to_end)]
        counts = (r.num_steps, r.num_output_tokens, r.num_preemptions, r.num_prompt_tokens, r.num_cached_tokens)
        return counts, r.seconds, r.num_leaked_blocks, histograms

    settings = [(51, False), (60, False), (60, True), (101, True)]
    together = [outcome(*setting) for setting in settings]
    monkeypatch.setattr("foreword.simulation.replica.Replica._repeat", lambda self, until: False)
    assert together == [outcome(*setting) for setting in settings]  # to the last bit


def test_the_example_load_is_served_and_shares_prefixes():
    trace = read_trace(Path(__file__).parents[2] / "examples" / "arrivals.jsonl")
    cost = CostModel(step=0.008, token=1e-5, context=0.0)
    config = SchedulerConfig(max_num_batched_tokens=8192)
    report = simulate(trace.arrivals, Fleet(config=config, cost=cost, max_model_len=32768, num_blocks=8192))
    assert report.num_requests == 240
    assert report.hit_rate > 0.5


def some_arrivals(count: int, load: float) -> list[Arrival]:
    """Prompts of a few beginnings, with arrivals in bursts."""
    random = np.random.default_rng(7)
    times = np.cumsum(random.exponential(20.0 / load, count) * (random.random(count) < 0.7))
    return [
        Arrival(float(t), int(random.integers(1, 1500)), int(random.integers(1, 60)), tuple(random.integers(3, size=2)))
        for t in times
    ]


SMALL = {"max_model_len": 2000, "num_blocks": 300, "block_size": 16, "cost": CostModel(0.7, 0.001, 1e-4)}


def test_the_outcome_is_that_of_the_engines_rows_and_cache_with_tokens():
    arrivals, budget = some_arrivals(120, 4.0), {"max_num_batched_tokens": 700, "max_num_seqs": 8}
    config = SchedulerConfig(watermark=0.0, reserve_full_prompt=False, **budget)
    report = simulate(arrivals, Fleet(config=config, **SMALL | {"num_blocks": 150}))
    states = RequestStates(max_num_reqs=8, max_model_len=2000, vocab_size=10**6, kv_groups=[KVGroup(16)])
    cache = KVCacheManager(states, 150, partial_reuse=False)
    scheduler, cost = Scheduler(states, cache, config), SMALL["cost"]
    now, index, first, last, cached, preemptions = 0.0, 0, {}, {}, {}, 0
    while index < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[index].time)
        while index < len(arrivals) and arrivals[index].time <= now:
            a = arrivals[index]
            tokens = np.repeat(np.array(a.hash_ids, np.int32), 512)[: a.input_length]
            tokens = np.append(tokens, np.full(a.input_length - len(tokens), 1000 + index, np.int32))
            end = a.input_length + a.output_length
            scheduler.add(Request(request_id=str(index), prompt=tokens, arrival=index, max_len=end))
            index += 1
        plan = scheduler.schedule()
        preemptions += len(plan.preempted)
        for request in plan.admitted:
            cached.setdefault(request.arrival, request.num_cached)
        states.num_computed_tokens[plan.rows] += plan.num_scheduled
        now += cost.seconds(plan.num_tokens, int(states.num_computed_tokens[plan.rows].sum()))
        for row in plan.rows[states.num_computed_tokens[plan.rows] == states.num_tokens[plan.rows]].tolist():
            states.token_ids[row, states.num_tokens[row]] = 5000 + scheduler.running.request_in(row).arrival
            states.num_tokens[row] += 1
            first.setdefault(scheduler.running.request_in(row).arrival, now)
        scheduler.commit(plan)
        done = plan.rows[states.num_tokens[plan.rows] >= scheduler.running.max_len[plan.rows]]
        last |= {scheduler.running.request_in(row).arrival: now for row in done.tolist()}
        scheduler.finish(done)
    assert preemptions > 0
    assert report.num_preemptions == preemptions
    assert report.num_cached_tokens == sum(cached.values()) > 10_000
    assert report.seconds == now
    for found, known in ((report.time_to_first_token, first), (report.end_to_end, last)):
        seconds = np.sort([moment - arrivals[i].time for i, moment in known.items()])
        assert np.sort(found.values) == pytest.approx(seconds, rel=1e-6)


def test_replicas_are_simulations_of_what_they_were_sent():
    arrivals = some_arrivals(90, 8.0)
    whole = simulate(arrivals, Fleet(num_replicas=3, router="round-robin", **SMALL))
    parts = [simulate(arrivals[i::3], Fleet(**SMALL)) for i in range(3)]
    assert whole.num_steps == sum(part.num_steps for part in parts)
    assert whole.busy == [part.busy[0] for part in parts]
    ends = np.sort(np.concatenate([part.end_to_end.values for part in parts]))
    assert np.sort(whole.end_to_end.values).tolist() == ends.tolist()
    assert whole.num_leaked_blocks == 0


def test_the_number_of_processes_does_not_change_the_outcome():
    load = Trace(tuple(some_arrivals(60, 10.0))).requests(150)
    fleet = Fleet(num_replicas=5, router="prefix", **SMALL)
    one, two = simulate(load, fleet), simulate(load, fleet, processes=2)
    assert (one.num_requests, one.num_steps, one.num_cached_tokens) == (150, two.num_steps, two.num_cached_tokens)
    assert sorted(one.busy) == sorted(two.busy)
    assert np.sort(one.time_to_first_token.values).tolist() == np.sort(two.time_to_first_token.values).tolist()


def test_prompts_that_begin_alike_meet_on_a_replica():
    arrivals = [Arrival(5.0 * i, 600, 2, (i % 7,)) for i in range(80)]
    robin, prefix = (simulate(arrivals, Fleet(num_replicas=8, router=r, **SMALL)) for r in ("round-robin", "prefix"))
    assert robin.num_cached_tokens == (80 - 56) * 512
    assert prefix.num_cached_tokens == (80 - 7) * 512


def test_a_long_pause_with_requests_in_progress_is_passed_over():
    fleet = Fleet(num_replicas=2, max_model_len=200, num_blocks=51, block_size=4, cost=CostModel(step=1e5))
    report = simulate([Arrival(0.0, 10, 50), Arrival(9e9, 10, 1)], fleet)
    assert report.num_requests == 2


def test_a_fleet_that_cannot_be_is_refused():
    for wrong in ({"num_replicas": 0}, {"num_replicas": 10_001}, {"router": "x"}, {"tick": 0.0}):
        with pytest.raises(ConfigError, match="must be"):
            Fleet(**SMALL, **wrong)
    with pytest.raises(ConfigError, match="processes=0"):
        simulate([], Fleet(**SMALL), processes=0)
