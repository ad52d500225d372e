"""`simulate --from`: an engine with a clock of its own is recorded, and the simulation predicts what happened to it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from foreword.batch import KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.cli.app import app
from foreword.engine import Engine, EngineConfig
from foreword.errors import ConfigError
from foreword.scheduler import SchedulerConfig
from foreword.simulation import CostModel, Fleet, read_recording, simulate

COST = CostModel(step=0.02, token=3e-4, context=2e-6)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class TimedModel(NothingModel):
    """Takes the time of a cost model."""

    def __init__(self, clock):
        super().__init__(64, 64)
        self.clock = clock

    def compute(self, batch, logits_indices):
        context = int((batch.num_computed_tokens + batch.num_scheduled_tokens).sum())
        self.clock.now += COST.seconds(batch.num_tokens, context)
        return super().compute(batch, logits_indices)


def load(seed=0, count=40):
    """(time, prompt, output tokens, salt) of requests with beginnings in common, also with another answer."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(8, 64, 48).tolist() for _ in range(3)]
    time = 100.5
    for i in range(count):
        time += float(rng.exponential(0.12))
        prompt = shared[int(rng.integers(3))] + rng.integers(8, 64, int(rng.integers(1, 40))).tolist()
        if i % 5 == 4:
            prompt = [*shared[0], *[7] * 20, 9]  # the model only answers 7
        yield time, prompt, int(rng.integers(2, 40)), None if i % 7 else "a tenant"


def record(path, requests, aborts=(), **config):
    """Serve the requests, each as its time comes, and end those with a number in ``aborts`` after some steps."""
    clock = Clock()
    engine = Engine(
        TimedModel(clock),
        vocab_size=64,
        max_model_len=128,
        kv_groups=[KVGroup(8)],
        num_blocks=70,
        clock=clock,
        config=EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64),
            partial_reuse=False,
            record=str(path),
            **config,
        ),
    )
    waiting = list(enumerate(requests))
    steps = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][1][0] <= clock.now or not engine.has_work):
            i, (time, prompt, count, salt) = waiting.pop(0)
            now, clock.now = max(clock.now, time), time
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            group = engine.check(f"q{i}", prompt, params, cache_salt=salt)
            clock.now = now
            engine.add(group)
        engine.step()
        steps += 1
        for i in aborts:
            if f"q{i}" in engine and steps % 9 == 0:
                engine.abort(f"q{i}")
    engine.close()
    return engine


def test_the_costs_and_latencies_of_an_engine_are_predicted(tmp_path):
    record(tmp_path / "steps.jsonl", load())
    found = read_recording(tmp_path / "steps.jsonl")
    assert (found.cost.step, found.cost.token, found.cost.context) == pytest.approx((0.02, 3e-4, 2e-6), rel=0.01)
    assert found.cost_error < 1e-3
    assert [note[:49] for note in found.notes] == ["the recording does not say which requests stream:"]
    settings = dict(found.settings)
    cache = {n: settings.pop(n) for n in ("max_model_len", "num_blocks", "block_size", "prefix_caching")}
    fleet = Fleet(config=SchedulerConfig(**settings), cost=found.cost, hashed_tokens=found.trace.hashed_tokens, **cache)
    report = simulate(found.trace.requests(40), fleet)
    assert report.num_cached_tokens > 1000
    for name in ("time_to_first_token", "time_per_output_token", "end_to_end"):
        measured, predicted = getattr(found.measured, name), getattr(report, name)
        assert measured.count == predicted.count == 40
        levels = (10, 50, 90, 99)
        assert predicted.percentiles(*levels) == pytest.approx(measured.percentiles(*levels), rel=0.02), name
    assert report.time_between_tokens.count == found.measured.time_between_tokens.count
    assert report.num_output_tokens == sum(count for _, _, count, _ in load())


def test_answers_are_content_that_later_prompts_share(tmp_path):
    engine = record(
        tmp_path / "steps.jsonl", [(101.0, [8] * 16, 17, None), (105.0, [8] * 16 + [7] * 16 + [9], 2, None)]
    )
    assert engine.cache.pool.num_used == 0
    first, second = read_recording(tmp_path / "steps.jsonl").trace.arrivals
    assert first.hash_ids[:4] == second.hash_ids[:4]
    assert (first.num_hashed, second.num_hashed) == (32, 32)


def test_equal_prompts_of_other_salts_share_nothing(tmp_path):
    record(tmp_path / "steps.jsonl", [(101.0, [8] * 16, 3, None), (105.0, [8] * 16, 3, "x"), (107.0, [8] * 16, 3, "x")])
    none, salted, again = (arrival.hash_ids for arrival in read_recording(tmp_path / "steps.jsonl").trace.arrivals)
    assert salted == again
    assert not set(none) & set(salted)


def test_requests_that_were_cut_short_take_part_and_do_not_count(tmp_path):
    record(tmp_path / "steps.jsonl", load(), aborts=(3, 11, 20))
    found = read_recording(tmp_path / "steps.jsonl")
    short = [arrival for arrival in found.trace.arrivals if not arrival.is_measured]
    assert 1 <= len(short) <= 3
    assert found.measured.end_to_end.count == len(found.trace.arrivals) - len(short)
    assert any("were cut short" in note for note in found.notes)


@pytest.mark.parametrize("token_ids", ["hashed", "omitted"])
def test_hashed_ids_keep_the_beginnings_in_common_and_omitted_ones_say_that_they_do_not(tmp_path, token_ids):
    record(tmp_path / "plain.jsonl", load())
    record(tmp_path / "steps.jsonl", load(), record_token_ids=token_ids)
    plain, found = (read_recording(tmp_path / name) for name in ("plain.jsonl", "steps.jsonl"))
    shared = [len({i for a in one.trace.arrivals for i in a.hash_ids}) for one in (plain, found)]
    assert [a.input_length for a in found.trace.arrivals] == [a.input_length for a in plain.trace.arrivals]
    assert shared[1] == (0 if token_ids == "omitted" else shared[0])
    assert b"a tenant" not in (tmp_path / "steps.jsonl").read_bytes()
    assert any("no token ids" in note for note in found.notes) == (token_ids == "omitted")


def test_a_cut_recording_is_used_up_to_the_cut(tmp_path):
    path = tmp_path / "steps.jsonl"
    record(path, load())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = read_recording(path)
    assert len(found.trace.arrivals) > 5
    assert "what comes before it is used" in found.notes[0]


def test_a_recording_without_times_or_requests_is_refused(tmp_path):
    path = tmp_path / "steps.jsonl"
    record(path, load(count=3))
    lines = path.read_text().splitlines()
    (tmp_path / "empty.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(ConfigError, match="has no requests"):
        read_recording(tmp_path / "empty.jsonl")
    bare = [json.loads(line) for line in lines]
    for line in bare:
        for name in ("model_ms", "host_us"):
            line.pop(name, None)
        for value in line.values():
            if isinstance(value, dict):
                value.pop("time", None)
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, bare)) + "\n")
    with pytest.raises(ConfigError, match="has no times of steps"):
        read_recording(tmp_path / "bare.jsonl")


def test_a_policy_that_a_file_names_is_not_loaded_and_an_unknown_setting_refused(tmp_path):
    path = tmp_path / "steps.jsonl"
    record(path, load(count=5))
    first, *lines = path.read_text().splitlines()
    header = json.loads(first)
    for change, message in (({"policy": "os:abort"}, None), ({"colour": "red"}, "settings: unknown name 'colour'")):
        changed = {**header, "settings": header["settings"] | change}
        path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
        if message is None:
            found = read_recording(path)
            assert found.settings["policy"] == "fcfs"
            assert found.notes[0].startswith("policy 'os:abort' is not one of Foreword's: simulated as fcfs")
        else:
            with pytest.raises(ConfigError, match=message):
                read_recording(path)


def invoke(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_the_command_prints_predicted_beside_measured_and_answers_what_if(tmp_path):
    record(tmp_path / "steps.jsonl", load())
    alone = invoke("--from", tmp_path / "steps.jsonl")
    assert alone.exit_code == 0, alone.output
    assert "measured  predicted    error" in alone.output
    errors = [line.split()[-1] for line in alone.output.splitlines() if line.endswith("%") and " p" in line]
    assert len(errors) == 12
    assert all(abs(int(error.rstrip("%"))) <= 3 for error in errors), alone.output
    assert "per output token ms" in alone.output
    asked = invoke(
        "--from", tmp_path / "steps.jsonl", "--json", "--policies", "fcfs,shortest-first", "--max-num-seqs", 3
    )
    first, *others = map(json.loads, asked.output.splitlines())
    assert first["measured"].keys() == first["predicted"].keys()
    assert [one["policy"] for one in others] == ["fcfs", "shortest-first"]
    slower = others[0]["time_to_first_token_s"]["p90"]
    assert slower > first["predicted"]["time_to_first_token_s"]["p90"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --trace and --from"),
        (["--trace", "a.csv", "--from", "b.jsonl"], "give one of --trace and --from"),
        (["--from", "b.jsonl", "--plot", "a.png"], "must end with .svg or .html"),
    ],
)
def test_wrong_use_is_refused(arguments, message):
    done = invoke(*arguments)
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"


def test_a_recording_without_a_complete_request_has_dashes_and_a_wrong_router_is_refused_at_once(tmp_path):
    path = tmp_path / "steps.jsonl"
    record(path, load(count=2))
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"end"' not in line))
    done = invoke("--from", path)
    assert done.exit_code == 0, done.output
    assert "–" in done.output
    assert "nan" not in done.output
    wrong = invoke("--from", path, "--router", "nowhere")
    assert wrong.exit_code != 0
    assert wrong.output == ""


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_charts_have_every_latency_and_the_memory(tmp_path, ending):
    record(tmp_path / "steps.jsonl", load(count=10))
    done = invoke("--from", tmp_path / "steps.jsonl", "--policies", "fcfs,priority", "--plot", tmp_path / f"a.{ending}")
    assert done.exit_code == 0, done.output
    text = (tmp_path / f"a.{ending}").read_text()
    assert text.count("<polyline") == 2
    assert text.count("<rect") - text.count('y="31"') == 4 * 3 * 2 + 4 * 3 * 2
