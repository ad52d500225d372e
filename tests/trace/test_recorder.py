"""The recorder of an engine: every step in a file, the last ones in memory, and neither disturbs the engine."""

import gzip
import logging
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from foreword.batch import KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, StepError
from foreword.insight import Add, Arrive, Commit, End, Fail, Remove, Replay, Restart, Step, Trace, TraceReader, conform
from foreword.scheduler import SchedulerConfig
from foreword.trace import background, ring
from foreword.trace.destination import Destination
from foreword.trace.writer import older


class DeviceLost(RuntimeError):
    pass


class Failing(NothingModel):
    """Fails in the launches of these numbers."""

    reads_gathered_tables = True
    fails = ()
    error = DeviceLost("the device is lost")
    count = 0

    def launch(self, batch, sampling):
        self.count += 1
        if self.count in self.fails:
            raise self.error
        return super().launch(batch, sampling)


GROUPS = {"one group": (KVGroup(4),), "a window": (KVGroup(4), KVGroup(4, sliding_window=6))}


def make(num_blocks=40, groups=GROUPS["one group"], tokenizer=None, **config):
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24)
    return Engine(
        Failing(num_blocks, 64),
        vocab_size=64,
        max_model_len=48,
        kv_groups=list(groups),
        num_blocks=num_blocks,
        config=EngineConfig(scheduler=scheduler, **config),
        tokenizer=tokenizer,
    )


def serve(engine, num_requests=10, seed=0):
    """Run requests to their end; failed steps are repeated."""
    rng = np.random.default_rng(seed)
    for i in range(num_requests):
        prompt = rng.integers(1, 9, int(rng.integers(1, 30))).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(2, 20)), detokenize=False)
        engine.add_request(f"q{i}", prompt, params)
    outputs = {}
    while engine.has_work:
        with suppress(DeviceLost):
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return {request_id: output.outputs[0].token_ids for request_id, output in outputs.items()}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("speculation", [None, SpeculationConfig(num_tokens=2)])
def test_every_step_is_recorded_and_replays_also_with_preemptions_and_failures(tmp_path, is_async, groups, speculation):
    path = tmp_path / "steps.jsonl.gz"
    options = {"async_scheduling": is_async, "speculation": speculation, "flight_folder": str(tmp_path)}
    expected = serve(make(24, groups, **options))
    engine = make(24, groups, record=str(path), record_tensors=3, **options)
    engine.executor.fails = (7, 15)
    assert serve(engine) == expected
    engine.close()
    report = conform.run(path)
    assert report.ok, str(report)
    events = Trace.read(path).events
    steps = sum(isinstance(event, Step) for event in events)
    assert report.num_steps == steps
    assert report.num_tensors > steps * 15 / 3
    assert sum(isinstance(event, Commit) for event in events) == steps - 2
    assert sum(isinstance(event, Fail) for event in events) == 2
    assert any(isinstance(event, Remove) and event.preempted for event in events)
    for kind in (Arrive, End):
        assert sorted(e.req_id for e in events if isinstance(e, kind)) == sorted(expected)
    times = [event.time for event in events if isinstance(event, Step)]
    assert times == sorted(times)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_file_of_an_engine_that_is_idle_and_was_not_closed_is_complete(tmp_path, is_async):
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), async_scheduling=is_async)
    outputs = serve(engine, 3)
    engine.recorder._file.flush()  # as at the exit of the interpreter
    events = Trace.read(path).events
    assert {event.req_id for event in events if isinstance(event, End)} == outputs.keys()
    assert sum(isinstance(event, Commit) for event in events) == sum(isinstance(event, Step) for event in events)
    engine.close()


def test_a_program_that_ends_without_closing_its_engine_leaves_every_commit_in_the_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_recorder import SamplingParams, make
engine = make(record={str(path)!r})
for name in "ab":
    params = SamplingParams(max_tokens=4 if name == "a" else 9, temperature=0.0, detokenize=False)
    engine.add_request(name, [1, 2], params)
for _ in range(4):
    engine.step()
sys.exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    events = Trace.read(path).events
    assert [type(event) for event in events if isinstance(event, Step | Commit)] == [Step, Commit] * 4
    assert [event.req_id for event in events if isinstance(event, End)] == ["a"]  # which ended after the last step


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_recorded_steps_can_soon_be_read_without_any_further_call_as_after_the_end_by_a_signal(tmp_path, name):
    path = tmp_path / name
    engine = make(record=str(path))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=9, temperature=0.0, detokenize=False))
    for _ in range(4):
        engine.step()
    is_read, deadline = False, time.monotonic() + 60
    while not is_read and time.monotonic() < deadline:
        time.sleep(0.01)
        data = path.read_bytes()
        text = zlib.decompressobj(31).decompress(data) if path.suffix == ".gz" else data
        is_read = sum('"step"' in line for line in text.decode().splitlines()[1:]) == 4
    assert is_read
    engine.close()


def test_samples_have_the_log_probabilities_that_requests_asked_for(tmp_path):
    engine = make(record=str(tmp_path / "steps.jsonl"))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3, logprobs=2, temperature=0.0, detokenize=False))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=3, temperature=0.0, detokenize=False))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    commits = [event for event in TraceReader(tmp_path / "steps.jsonl") if isinstance(event, Commit)]
    (output,) = (o.outputs[0] for o in outputs if o.request_id == "a" and o.finished)
    expected = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    found = [value for commit in commits for value in commit.logprobs.get("a", ())]
    assert found == pytest.approx(expected, abs=1e-5)
    assert not any("b" in commit.logprobs for commit in commits)


@pytest.mark.parametrize("is_async", [False, True])
def test_salts_are_recorded_also_after_a_new_part_begins(tmp_path, is_async):
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), async_scheduling=is_async)
    salts = {f"q{i}": (None, "tenant", "other")[i % 3] for i in range(6)}
    for req_id, salt in salts.items():
        params = SamplingParams(temperature=0.0, max_tokens=9, detokenize=False)
        engine.add_request(req_id, [1, 2, 3], params, cache_salt=salt)
    for _ in range(3):
        engine.step()
    engine.recorder._file.lost = "a test loses them"
    while engine.has_work:
        engine.step()
    engine.close()
    adds = [event for event in TraceReader(path) if isinstance(event, Add)]
    assert len(adds) > len(salts)
    assert all(event.cache_salt == salts[event.req_id] for event in adds)
    settings = TraceReader(path).header.settings
    assert (settings["num_blocks"], settings["policy"], settings["max_num_seqs"]) == (40, "fcfs", 4)


@pytest.mark.parametrize(("special", "reason"), [({"<think>": 60}, "differs"), ({"<think>": 2}, "template")])
def test_a_recording_says_why_a_prompt_was_not_in_the_cache(tmp_path, special, reason):
    """A special token at the place is the template's, as in the engine's own answer."""
    path, told = tmp_path / "steps.jsonl", []
    engine = make(record=str(path), tokenizer=SimpleNamespace(special_token_ids=special))
    for req_id, prompt in (("a", [1] * 12), ("b", [1] * 9 + [2, 3, 4]), ("c", [1] * 12)):
        engine.add_request(req_id, prompt, SamplingParams(temperature=0.0, max_tokens=2, detokenize=False))
        engine.step()
        miss = engine.cache_miss(req_id)
        told.append("" if miss is None else f"{miss.reason} at {miss.position}")
        while engine.has_work:
            engine.step()
    engine.close()
    found = [event.cache_miss for event in TraceReader(path) if isinstance(event, Add)]
    assert found == told == ["never_computed at 0", f"{reason} at 9", ""]
    assert conform.run(path).ok


def test_the_reason_of_a_miss_is_kept_where_a_trace_begins_later(tmp_path):
    """In a new part of the file, in the ring, and in a trace that is cut to its last steps."""
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), flight_steps=4)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, detokenize=False))
    for _ in range(3):
        engine.step()
    engine.recorder._file.lost = "a test loses them"
    for _ in range(12):
        engine.step()
    snapshot = engine.recorder.recent().snapshot
    engine.close()
    trace = Trace.read(path)
    parts = [event.cache_miss for event in trace.events if isinstance(event, Add)]
    cut = [event.cache_miss for event in Replay.rebase(trace, 2).events if isinstance(event, Add)]
    assert len(parts) == len(cut) == 2
    assert {*parts, *cut, *(request.cache_miss for request in snapshot)} == {"never_computed at 0"}
    assert len(snapshot) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_the_times_of_the_steps_add_up_to_the_time_with_requests(tmp_path, is_async):
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), async_scheduling=is_async)
    serve(engine, 4)
    time.sleep(0.05)  # without requests
    serve(engine, 4, seed=1)
    engine.close()
    events = list(TraceReader(path))
    half = [i for i, event in enumerate(events) if isinstance(event, Arrive)][4]
    for part in (events[:half], events[half:]):
        arrived = next(event.time for event in part if isinstance(event, Arrive))
        commits = [event for event in part if isinstance(event, Commit)]
        assert all(event.model_ms > 0 and event.host_us > 0 for event in commits)
        total = sum(event.model_ms / 1e3 + event.host_us / 1e6 for event in commits)
        last = [event for event in part if isinstance(event, Step)][-1].time + commits[-1].model_ms / 1e3
        ends = [event for event in part if isinstance(event, End)]
        assert last - 1e-4 < arrived + total < ends[-1].time + 1e-4
        assert all(event.arrival <= arrived + 1e-4 or event.arrival < event.time for event in ends)


def test_a_recording_of_a_limited_size_holds_the_last_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "PAUSE", 0.0)
    path = tmp_path / "steps.jsonl"
    engine = make(record=f"{path}:64KiB", record_tensors=1)
    for _ in range(6):
        serve(engine, 5)
        engine.recorder.close()  # the thread may be behind on a busy machine, and the file longer
    engine.close()
    parts = [conform.run(p) for p in (older(path), path)]
    assert all(part.ok for part in parts), "\n".join(map(str, parts))
    first = [TraceReader(p).header.first_step for p in (older(path), path)]
    assert first[1] == first[0] + parts[0].num_steps
    assert first[0] > 1
    last = first[1] + parts[1].num_steps - 1
    assert last == engine.recorder._num_steps


def test_a_file_of_the_name_is_kept_under_another_name(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("an older recording")
    engine = make(record=str(path))
    assert older(path).read_text() == "an older recording"
    serve(engine, 2)
    engine.close()
    assert conform.run(path).ok


def test_a_full_disk_ends_the_recording_once_and_the_engine_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "PAUSE", 0.0)
    engine = make(record="/dev/full")
    with caplog.at_level(logging.ERROR):
        outputs = serve(engine, 40)
        engine.close()
        serve(engine, 2)
        engine.close()
    assert len(outputs) == 40
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == ("/dev/full: the recording of steps ended early (No space left on device); the engine goes on")


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"record='.*/missing/steps.jsonl': cannot be written \(No such file"):
        make(record=str(tmp_path / "missing" / "steps.jsonl"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("steps.jsonl:many", "'many' is not a size: give FILE, or FILE:SIZE"),
        ("steps.jsonl:1KB", "the size must be at least 65536 bytes"),
        ("", "expected the name of a file"),
        (3, "expected the name of a file"),
    ],
)
def test_another_destination_is_refused_with_the_reason(given, reason):
    with pytest.raises(ConfigError, match=f"record={given!r}: {reason}"):
        EngineConfig(record=given)


def test_destinations_of_several_processes_differ():
    assert str(Destination.of("a/steps.jsonl.gz:100KB").numbered(2)) == "a/steps.2.jsonl.gz:100000"
    assert str(Destination.of("steps").numbered(0)) == "steps.0"


def test_steps_that_were_lost_are_said_and_the_rest_replays(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MAX_PENDING", 8)
    monkeypatch.setattr(background, "PAUSE", 0.001)
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), record_tensors=1)
    serve(engine, 60)
    engine.close()
    engine.recorder._file.lost = "a test loses them"
    serve(engine, 20, seed=1)
    engine.close()
    report = conform.run(path)
    assert report.ok, str(report)
    restarts = [event for event in TraceReader(path) if isinstance(event, Restart)]
    assert restarts
    assert restarts[-1].first_step + 1 > 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_step_writes_the_last_steps_and_says_where(tmp_path, caplog, is_async):
    engine = make(24, GROUPS["a window"], flight_steps=10, flight_folder=str(tmp_path), async_scheduling=is_async)
    engine.executor.fails = (47,)
    engine.executor.error = DeviceLost("the device is lost")
    with caplog.at_level(logging.ERROR):
        serve(engine, 20)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    report = conform.run(path)
    assert report.ok, str(report)
    assert 10 <= report.num_steps < 20
    trace = Trace.read(path)
    assert trace.header.token_ids == "hashed"
    assert isinstance(next(e for e in reversed(trace.events) if not isinstance(e, Remove)), Fail)
    assert trace.header.first_step + report.num_steps - 1 == 47
    (note,) = engine.executor.error.__notes__
    assert note == f"the last {report.num_steps} steps are in {path}: `foreword conform {path}` replays them"
    assert note in caplog.text
    assert note in str(StepError(engine.executor.error))


def test_after_an_interrupt_the_recording_begins_again_with_the_requests_in_progress(tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = make(record=str(path), record_tensors=1, flight_steps=5, flight_folder=str(tmp_path))
    original, engine.executor.error = engine.recorder._capture.step, KeyboardInterrupt()

    def torn(*arguments, **others):
        engine.recorder._capture.step = original
        raise KeyboardInterrupt

    for i in range(6):
        engine.add_request(f"q{i}", [1, 2, 3 + i], SamplingParams(max_tokens=9, temperature=0.0, detokenize=False))
    for step in range(30):
        if step in (4, 9):
            engine.recorder._capture.step = torn
        with suppress(KeyboardInterrupt):
            engine.step()
    assert not engine.has_work
    engine.close()
    report = conform.run(path)
    assert report.ok, str(report)
    assert [e.reason for e in TraceReader(path) if isinstance(e, Restart)] == [
        "the engine was interrupted (KeyboardInterrupt)"
    ] * 2
    engine.recorder._ring.write(tmp_path / "ring.jsonl", engine.recorder.header("plain"))
    assert conform.run(tmp_path / "ring.jsonl").ok


def test_an_engine_writes_few_files_of_failed_steps(tmp_path):
    engine = make(flight_steps=4, flight_folder=str(tmp_path))
    engine.executor.fails = range(3, 30, 2)
    serve(engine, 6)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_does_not_change_the_error(tmp_path, caplog):
    engine = make(flight_folder=str(tmp_path / "missing"))
    engine.executor.fails = (3,)
    engine.executor.error = DeviceLost("another error")
    serve(engine, 2)
    assert f"the last steps could not be written: [Errno 2] No such file or directory: '{tmp_path}" in caplog.text
    assert not hasattr(engine.executor.error, "__notes__")


def test_the_ring_keeps_a_bounded_number_of_steps(monkeypatch):
    engine = make(flight_steps=8)
    kept = engine.recorder._ring
    sizes = set()
    for seed in range(3):
        serve(engine, 10, seed)
        sizes.add(kept._newer.num_steps + (kept._older.num_steps if kept._older else 0))
        assert len(kept._newer.captured) < 8 * 12
    assert max(sizes) < 17
    monkeypatch.setattr(ring, "MAX_BYTES", 1000)
    serve(engine, 10)
    assert kept._newer.nbytes < 3000


def test_without_the_settings_an_engine_has_no_recorder():
    engine = make(flight_steps=0)
    assert engine.recorder is None
    assert engine.observers.members == []


def test_a_recording_without_token_ids_has_none(tmp_path):
    path = Path(tmp_path / "steps.jsonl.gz")
    engine = make(record=str(path), record_token_ids="omitted", record_tensors=1)
    serve(engine, 3)
    engine.close()
    assert conform.run(path).ok
    assert b"input_ids" not in gzip.decompress(path.read_bytes())
