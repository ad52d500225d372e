"""`foreword batch --ray` and the stage of Ray Data: results of the engine, errors as rows, replicas that end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import foreword
from foreword import LLM, SamplingParams
from foreword.engine.engine import Engine
from foreword.errors import ConfigError, EngineError
from foreword.openai.batch_file import batch_lines

ray = pytest.importorskip("ray", reason="needs foreword[ray]: `make ray`")
from typer.testing import CliRunner  # noqa: E402

from foreword.cli.app import app  # noqa: E402
from foreword.ray.batch import RayBatch  # noqa: E402
from foreword.ray.data import ForewordStage  # noqa: E402

SOURCES = str(Path(foreword.__file__).parents[1])
OPTIONS = {"num_threads": 1, "max_model_len": 512, "max_num_seqs": 8}
POISON = ["no json", json.dumps({"custom_id": "x"}), json.dumps({"custom_id": "big", "method": "POST",
          "url": "/v1/completions", "body": {"prompt": "a" * 600, "max_tokens": 4}})]  # fmt: skip


def request(number: int) -> str:
    body = {"prompt": f"{number}", "max_tokens": 1 + number % 7, "temperature": 0}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body})


def text_of(record: dict) -> str | None:
    return record["response"]["body"]["choices"][0]["text"] if record["response"] else None


@pytest.fixture(scope="module")
def known(talker: Path) -> list[str]:
    params = [SamplingParams(max_tokens=1 + i % 7, temperature=0) for i in range(100)]
    return [o.outputs[0].text for o in LLM(str(talker), **OPTIONS).generate([f"{i}" for i in range(100)], params)]


def test_results_are_those_of_the_engine_in_order_and_a_second_run_continues(
    cluster: None, talker: Path, known: list[str], tmp_path: Path
):
    (tmp_path / "in").write_text("\n".join([*map(request, range(60)), *POISON, *map(request, range(60, 100))]) + "\n")
    arguments = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--ray", "--replicas", "2", "--ordered", "-q"]
    arguments += ["--model", str(talker), "--max-num-seqs", "8", "--max-model-len", "512"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    records = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [record["id"] for record in records] == [f"batch_req_{n}" for n in range(1, 104)]
    answered = records[:60] + records[63:]
    assert [record["custom_id"] for record in answered] == [f"c{i}" for i in range(100)]
    assert [text_of(record) for record in answered] == known
    assert [record["error"] is not None or record["response"]["status_code"] == 400 for record in records[60:63]] == [
        True
    ] * 3
    whole = (tmp_path / "out").read_text()
    (tmp_path / "out").write_text(whole[: len(whole) // 2])
    assert CliRunner().invoke(app, arguments).exit_code == 1
    again = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [text_of(r) for r in again if (r["custom_id"] or "").startswith("c")] == known


def test_lines_of_a_replica_that_ended_are_done_by_another_one(cluster: None, talker: Path, known: list[str]):
    batch = RayBatch([str(talker)], 2, OPTIONS, ordered=True)
    records = batch.run(batch_lines(request(i).encode() for i in range(100)))
    texts = [text_of(next(records)) for _ in range(10)]
    ray.kill(batch._replicas[0])
    assert texts + [text_of(record) for record in records] == known


def test_a_line_that_ends_replicas_is_an_error_and_the_others_are_answered(
    cluster: None, talker: Path, known: list[str]
):
    class Deadly:
        """A value that ends the process of the worker that receives it."""

        def __reduce__(self):
            return exec, ("import os, ray\nif ray.get_runtime_context().worker.mode == ray.WORKER_MODE: os._exit(1)",)

    lines = list(batch_lines(request(i).encode() for i in range(12)))
    object.__setattr__(lines[5], "body", {"prompt": Deadly()})
    found = {r["custom_id"]: r for r in RayBatch([str(talker)], 2, OPTIONS).run(iter(lines))}
    assert found["c5"]["error"]["code"] == "replica_lost"
    assert [text_of(found[f"c{i}"]) for i in range(12) if i != 5] == known[:5] + known[6:12]


def test_what_cannot_be_is_told(cluster: None, talker: Path):
    with pytest.raises(ConfigError, match="Ray has 8 CPUs"):
        RayBatch([str(talker)], 9, {})
    with pytest.raises(Exception, match=r"none\.gguf"):
        list(RayBatch(["none.gguf"], 1, OPTIONS).run(iter(())))


def test_replicas_of_another_version_are_refused(cluster: None, talker: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foreword.ray.batch.__version__", "0.0.1")
    with pytest.raises(ConfigError, match=r"and 0\.0\.1 where this replica was started from"):
        list(RayBatch([str(talker)], 2, OPTIONS).run(iter(())))


def test_rows_of_a_data_set_are_answered_and_bad_ones_are_error_rows(cluster: None, talker: Path, known: list[str]):
    rows = [{"text": text, "n": n} for n, text in enumerate([*map(request, range(100)), *POISON])]
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    found = (
        ray.data.from_items(rows)
        .map_batches(
            ForewordStage,
            fn_constructor_args=(str(talker),),
            fn_constructor_kwargs=OPTIONS,
            batch_size=40,
            concurrency=2,
            num_cpus=1,
        )
        .take_all()
    )
    assert [row["n"] for row in found] == list(range(103))
    results = [json.loads(row["result"]) for row in found]
    assert [text_of(record) for record in results[:100]] == known
    assert all(r["error"] is not None or r["response"]["status_code"] == 400 for r in results[100:])


def test_an_engine_that_fails_makes_error_rows_alone(talker: Path, known: list[str], monkeypatch: pytest.MonkeyPatch):
    stage, step = ForewordStage(str(talker), **OPTIONS), Engine.step

    def failing(engine: Engine):
        live = engine.states.token_ids[engine.states.live, :5].astype(np.uint8)
        if any(row.tobytes() == b"fatal" for row in live):
            raise EngineError("it failed")
        return step(engine)

    monkeypatch.setattr(Engine, "step", failing)
    fatal = request(2).replace('"prompt": "2"', '"prompt": "fatal"')
    first, second, third = map(json.loads, stage({"text": [request(3), fatal, request(4)]})["result"])
    stage.close()
    assert second["error"]["code"] == "engine_failed"
    assert [text_of(first), text_of(third)] == known[3:5]


def test_a_head_node_that_vanishes_ends_the_command_and_the_same_command_continues(talker: Path, tmp_path: Path):
    count, given, out = 600, tmp_path / "in", tmp_path / "out"
    given.write_text("\n".join(map(request, range(count))) + "\n")
    command = [sys.executable, "-m", "foreword", "batch", given, out, "--ray", "--replicas", "2", "-q"]
    command += ["--model", talker, "--max-num-seqs", "2", "--max-model-len", "512", "--num-threads", "1"]
    environment = {**os.environ, "PYTHONPATH": SOURCES, "RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as first:
        while not out.exists() or out.read_bytes().count(b"\n") < 10:
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.05)
        heads = [pid for pid, name in children(first.pid) if name == "gcs_server"]
        first.send_signal(signal.SIGSTOP)
        for pid in heads:
            os.kill(pid, signal.SIGKILL)
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate(timeout=120)
    assert len(heads) == 1
    assert first.returncode != 0
    assert b"GCS" in said
    before = out.read_bytes()
    assert 10 <= before.count(b"\n") < count
    again = subprocess.run(command, env=environment, capture_output=True, timeout=200, check=False)
    assert again.returncode == 0, again.stderr
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(record["custom_id"] for record in records) == sorted(f"c{i}" for i in range(count))
    assert all(record["response"]["status_code"] == 200 for record in records)


FULL_STORE = """
import json, sys
import ray
from foreword.errors import EngineError
from foreword.openai.batch_file import batch_lines
from foreword.ray.batch import RayBatch

full_disk = {"local_fs_capacity_threshold": 0.001, "automatic_object_spilling_enabled": False}
ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
         _system_config=full_disk)
held = ray.put(bytes(70 << 20))
texts = sys.stdin.read().splitlines()
large = [json.loads(text) for text in texts]
for each in large[20:]:
    each["body"]["user"] = "u" * (4 << 20)
lines, done = [json.dumps(each).encode() for each in large], {}

def run():
    left = [line for text, line in zip(texts, lines) if json.loads(text)["custom_id"] not in done]
    for record in RayBatch([sys.argv[1]], 2, {"num_threads": 1, "max_num_seqs": 8}).run(batch_lines(left)):
        done[record["custom_id"]] = record["response"]["body"]["choices"][0]["text"]

try:
    run()
except EngineError as error:
    print(json.dumps(str(error)), len(done), flush=True)
del held
run()
print(json.dumps(done))
"""


def test_a_full_object_store_is_told_and_nothing_answered_is_lost(talker: Path, known: list[str]):
    command = [sys.executable, "-c", FULL_STORE, talker]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    given = "\n".join(map(request, range(28))).encode()
    ran = subprocess.run(command, env=environment, input=given, capture_output=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    error, done = ran.stdout.decode().splitlines()
    assert error.startswith("\"Ray's object store is full")
    assert json.loads(done) == {f"c{i}": known[i] for i in range(28)}


def children(pid: int) -> list[tuple[int, str]]:
    """The processes that a process has started, and their names."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == pid:
                found.append((int(file.parent.name), name))
    return found
