"""Files, batches and stored responses, by the unchanged `openai` client, over restarts of the server."""

import errno
import json
import os
import re
import sqlite3
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import httpx
import pytest
from server_rig import HI, PATIENCE, serving

import openai
from foreword.errors import ConfigError
from foreword.openai.batch_file import Results
from foreword.server import batches
from foreword.server import store as stores
from foreword.server.batches import Batches
from foreword.server.errors import HttpError
from foreword.server.file_routes import add_file
from foreword.server.key_limits import digest_of
from foreword.server.models import Models
from foreword.server.responses import Responses
from foreword.server.store import Page, Store

KEYS = ("one", "two")


def client_of(server, key="one"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def started(talker, tmp_path):
    return lambda **settings: serving(
        talker, script="Yes.", api_key=KEYS, **{"data_directory": str(tmp_path / "data"), **settings}
    )


def line(name, **body):
    asked = {"messages": HI, "max_tokens": 8, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": asked})


def upload(client, *lines):
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def ask(client, *lines):
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def records(client, file_id):
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


@contextmanager
def locked(server):
    """Another program writes in the database within the block."""
    path = server.context.store.directory / "foreword.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def finished(client, batch):
    until = time.monotonic() + PATIENCE
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < until
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_a_batch_is_answered_after_a_restart_by_files_of_its_key(started):
    with started() as server:
        client = client_of(server)
        file = upload(client, line("a"), line("b", model="other"), line("c", top_p=7))
        assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
        with server.held():
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"x": "y"}
            )
            assert batch.status == "validating"
    with started() as server:
        client, other = client_of(server), client_of(server, "two")
        batch = finished(client, client.batches.retrieve(batch.id))
        assert (batch.status, batch.metadata) == ("completed", {"x": "y"})
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        records = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
        assert {record["custom_id"] for record in records} == {"a", "b"}
        assert records[0]["response"]["body"]["choices"][0]["message"]["content"] == "Yes."
        (error,) = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
        assert error["response"]["body"]["error"]["param"] == "top_p"
        assert {one.id for one in client.files.list()} == {file.id, batch.output_file_id, batch.error_file_id}
        assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
        assert list(other.files.list()) == list(other.batches.list()) == []
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file.id)
        with pytest.raises(openai.NotFoundError):
            other.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        server.check_nothing_is_left()


def test_a_file_with_a_wrong_line_fails_its_batch_and_names_the_line(started):
    with started() as server:
        client = client_of(server)
        file = upload(client, line("a"), "{", line("a"))
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = finished(client, batch)
        assert batch.status == "failed"
        assert [(one.line, one.code) for one in batch.errors.data] == [(2, "invalid_json"), (3, "duplicate_custom_id")]


def test_a_batch_is_cancelled_and_requests_of_clients_come_first(started):
    with started(engine={"max_num_seqs": 2}) as server:
        server.pace = 0.02
        client = client_of(server)
        file = upload(client, *(line(str(i)) for i in range(200)))
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        answer = client.chat.completions.create(model="talker", messages=HI, max_tokens=8)
        assert answer.choices[0].message.content == "Yes."
        assert client.batches.retrieve(batch.id).status in ("validating", "in_progress")
        batch = finished(client, client.batches.cancel(batch.id))
        assert batch.status == "cancelled"
        assert batch.request_counts.completed < 200
        server.check_nothing_is_left()


def test_a_batch_that_is_cancelled_while_its_file_is_checked_is_not_answered(started, monkeypatch):
    check, gate = batches._checked, threading.Event()
    monkeypatch.setattr(batches, "_checked", lambda *args: gate.wait(60) and check(*args))
    with started() as server:
        client = client_of(server)
        batch = ask(client, line("a"), line("b"))
        assert finished(client, client.batches.cancel(batch.id)).status == "cancelled"
        gate.set()
        assert finished(client, ask(client, line("c"))).status == "completed"  # the next one of the key
        assert client.batches.retrieve(batch.id).request_counts.completed == 0
        assert not server.context.store.path("batches", batch.id).exists()


def test_a_batch_waits_while_the_disk_is_full(started, monkeypatch, capfd):
    monkeypatch.setattr(batches, "PAUSE", 0.05)
    write, full = Results.write, OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Results, "write", lambda *_: (_ for _ in ()).throw(full))
    with started() as server:
        client, told = client_of(server), []
        batch = ask(client, line("a"), line("b"))
        server.wait_until(lambda: told.append(capfd.readouterr().err) or "No space left" in told[-1])
        monkeypatch.setattr(Results, "write", write)
        assert finished(client, batch).request_counts.completed == 2


def test_a_batch_goes_on_after_another_program_has_locked_the_database(started, monkeypatch, capfd):
    monkeypatch.setattr(stores, "WAIT", 0.05)
    monkeypatch.setattr(batches, "PAUSE", 0.05)
    with started() as server, ExitStack() as lock:
        client, told = client_of(server), []
        with server.held():
            batch = ask(client, line("a"), line("b"))
            server.wait_until(lambda: server.llm.engine.has_work)
            lock.enter_context(locked(server))
        server.wait_until(lambda: told.append(capfd.readouterr().err) or "database is locked" in told[-1])
        time.sleep(0.2)
        lock.close()
        batch = finished(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)
        assert {one.id for one in client.files.list()} == {batch.input_file_id, batch.output_file_id}
        assert {record["custom_id"] for record in records(client, batch.output_file_id)} == {"a", "b"}
        server.check_nothing_is_left()
    assert "".join([*told, capfd.readouterr().err]).count("database is locked") == 1


def test_lines_have_the_limits_of_requests_and_their_names_of_models(started):
    with started(max_completions=2, max_answer_bytes=1 << 20) as server:
        client = client_of(server)
        lines = (
            line("n", n=3),
            line("large", max_tokens=4000, logprobs=True, top_logprobs=5),
            line("a", model="talker:latest"),
        )
        batch = finished(client, ask(client, *lines))
        (record,) = records(client, batch.output_file_id)
        assert (record["custom_id"], record["response"]["body"]["model"]) == ("a", "talker")
        found = {one["custom_id"]: one["response"] for one in records(client, batch.error_file_id)}
        assert {name: (one["status_code"], one["body"]["error"]["code"]) for name, one in found.items()} == {
            "n": (400, None),
            "large": (400, "answer_too_large"),
        }
        assert "max_completions = 2" in found["n"]["body"]["error"]["message"]
        server.check_nothing_is_left()


def test_a_batch_waits_while_its_key_has_no_tokens_left(started, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE", 0.02)
    with started(key_limit=("one tokens_per_minute=6000",)) as server:
        client, uses, key, now = client_of(server), server.context.admission.keys, digest_of(b"one"), [0.0]
        uses._clock = lambda: now[0]
        uses.add_tokens(key, 6100)
        batch = ask(client, *(line(str(i)) for i in range(20)))
        server.wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        time.sleep(0.1)
        assert (server.steps, uses.has_tokens(key)) == (0, False)
        now[0] = 1.0
        server.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        time.sleep(0.1)
        assert client.batches.retrieve(batch.id).request_counts.completed == 1
        assert -50 < uses._use(key, uses._limits[key]).level < 0
        now[0] = 60.0
        batch = finished(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 20)
        server.check_nothing_is_left()


def test_a_batch_of_a_key_without_tokens_holds_up_no_batch_of_another_key(started, monkeypatch):
    monkeypatch.setattr(batches, "PAUSE", 0.02)
    with started(key_limit=("one tokens_per_minute=60",)) as server:
        uses, key, now = server.context.admission.keys, digest_of(b"one"), [0.0]
        uses._clock = lambda: now[0]
        uses.add_tokens(key, 100)
        one, two = client_of(server), client_of(server, "two")
        waiting, other = ask(one, line("a")), ask(two, *(line(str(i)) for i in range(3)))
        assert finished(two, other).request_counts.completed == 3
        assert one.batches.retrieve(waiting.id).status == "in_progress"
        now[0] = 3600.0
        assert finished(one, waiting).request_counts.completed == 1
        server.check_nothing_is_left()


def test_results_that_find_no_room_are_told_and_leave_no_file(started):
    lines = [line(str(i)) for i in range(20)]
    with started() as server:
        client = client_of(server)
        server.context.store.max_bytes = len("\n".join(lines)) + 3000
        batch = finished(client, ask(client, *lines))
        assert (batch.status, batch.output_file_id, batch.request_counts.completed) == ("failed", None, 20)
        (error,) = batch.errors.data
        assert error.code == "storage_full"
        assert "output file found no room" in error.message
        assert [path.name for path in server.context.store.directory.glob("*/*")] == [batch.input_file_id]


def test_a_process_that_waits_for_its_turn_keeps_no_file_open(started):
    with started() as server, ExitStack() as stack:
        client = client_of(server)
        finished(client, ask(client, line("a")))
        assert not Batches(Models.of(server.context))._is_first(stack)
        assert not stack._exit_callbacks


def test_without_a_directory_files_and_batches_are_refused_with_the_way_out(talker):
    with serving(talker) as server:
        for response in (server.get("/v1/files"), server.get("/v1/batches/x")):
            assert (response.status_code, response.json()["error"]["code"]) == (400, "not_stored")
            assert "--data-directory" in response.json()["error"]["message"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("durable", [False, True])
def test_a_response_follows_the_one_before_it(started, durable):
    with started() if durable else started(data_directory=None) as server:
        client = client_of(server)
        first = client.responses.create(model="talker", input="One", instructions="Be short.")
        assert first.store
        second = client.responses.create(model="talker", input=[{"role": "user", "content": "Two"}],
                                         previous_response_id=first.id)  # fmt: skip
        asked = [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Two"},
        ]
        whole = client.responses.create(model="talker", input=asked, store=False)
        assert second.usage.input_tokens == whole.usage.input_tokens
        assert second.previous_response_id == first.id
        assert client.responses.retrieve(second.id).output_text == "Yes."
        (item,) = client.responses.input_items.list(second.id)
        assert (item.role, item.content[0].text) == ("user", "Two")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        with client.responses.stream(model="talker", input="Three", previous_response_id=second.id) as stream:
            third = stream.get_final_response()
        assert client.responses.retrieve(third.id).previous_response_id == second.id
        other = client_of(server, "two")
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="talker", input="x", previous_response_id=first.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="talker", input="x", previous_response_id=second.id)
    if durable:
        with started() as server:
            assert client_of(server).responses.retrieve(third.id).output_text == "Yes."


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_locked_database_fails_no_answer_and_holds_up_no_other_request(started, monkeypatch, stream):
    monkeypatch.setattr(stores, "WAIT", 2.0)
    with started() as server, ExitStack() as stack:
        key = {"headers": {"Authorization": "Bearer one"}}
        before = server.post("/v1/responses", {"input": "y"}, **key).json()
        stack.enter_context(locked(server))
        answer = server.later("/v1/responses", {"input": "x", "stream": stream}, **key)
        server.wait_until(server.context.store._lock.locked)
        assert server.get("/health").status_code == 200
        assert server.get(f"/v1/responses/{before['id']}", **key).json()["output"] == before["output"]
        assert server.get("/v1/files", **key).json()["data"] == []
        assert not answer.done()
        assert answer.result(PATIENCE).status_code == 200
        assert answer.result().text.count('"store":false') == 1


def test_a_repeated_request_id_replaces_no_response(started):
    with started() as server:
        client, same = client_of(server), {"X-Request-Id": "same"}
        first = client.responses.create(model="talker", input="One", extra_headers=same)
        second = client.responses.create(model="talker", input="Two", previous_response_id=first.id, extra_headers=same)
        (item,) = client.responses.input_items.list(first.id)
        assert item.content[0].text == "One"
        assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_a_circle_of_responses_is_gone_through_once():
    with closing(Store(None, 1 << 20)) as store:
        responses = Responses(store, 1 << 20, is_open=True)
        for name, previous in (("a", "b"), ("b", "a")):
            said = {"id": name, "created_at": 1, "output": [{"of": name}], "previous_response_id": previous}
            responses.keep("one", said, [])
        assert responses.conversation("one", "a") == [{"of": "b"}, {"of": "a"}]


def test_room_is_made_of_one_owner_alone():
    with closing(Store(None, 1000)) as store:
        for owner in "ab":
            store.add("response", owner, "same", {})
        store.make_room("response", 1, 1000)
        assert (store.count("response", "a"), store.count("response", "b")) == (0, 1)


def test_a_server_that_stores_no_responses_refuses_what_needs_them(started):
    with started(store_responses=False) as server:
        for more in ({"store": True}, {"previous_response_id": "resp_x"}):
            body = {"input": "x", **more}
            response = server.post("/v1/responses", body, headers={"Authorization": "Bearer one"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "not_stored")
        assert not client_of(server).responses.create(model="talker", input="x").store


def test_a_store_has_a_limit_and_drops_what_was_not_used_for_longest(tmp_path):
    with closing(Store(tmp_path, 1000)) as store:
        for i in range(3):
            store.add("response", "a", f"r{i}", {"x": "y" * 200})
        with pytest.raises(HttpError, match="more than 1000 bytes"):
            store.add("file", "a", "f", {}, size=900)
        store.get("response", "a", "r0")
        store.make_room("response", 2, 1000)
        assert [store.state(f"r{i}") for i in range(3)] == ["", None, ""]
        items, has_more = store.listed("response", "a", Page(1))
        assert (len(items), has_more) == (1, True)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data_directory=.*cannot be used"):
        Store(tmp_path / "file" / "x", 1000)


def test_a_query_is_followed_or_refused(started):
    with (
        started() as server,
        httpx.Client(
            base_url=server.url, headers={"Authorization": "Bearer one"}, trust_env=False, timeout=60
        ) as client,
    ):
        for query in ("limit=0", "order=up", "what=1"):
            assert client.get(f"/v1/files?{query}").status_code == 400
        assert client.get("/v1/files?limit=5&order=asc&purpose=batch").json()["data"] == []
        files = {"file": b"x"}
        ids = [client.post("/v1/files", data={"purpose": "batch"}, files=files).json()["id"] for _ in range(2)]
        made = client.get("/v1/files").json()["data"][0]
        add_file(server.context.store, digest_of(b"one"), "out", "batch_output", b"x")
        page = client.get("/v1/files?limit=1&purpose=batch").json()
        assert (page["data"], page["has_more"]) == ([made], True)
        assert made["id"] == ids[1]
        assert client.post("/v1/files", data={"purpose": "assistants"}, files={"file": b"x"}).status_code == 400


def test_a_full_disk_or_a_database_that_cannot_be_used_has_a_status_and_names_the_setting(started, monkeypatch):
    monkeypatch.setattr(stores, "WAIT", 0.05)
    with (
        started() as server,
        httpx.Client(
            base_url=server.url, headers={"Authorization": "Bearer one"}, trust_env=False, timeout=60
        ) as client,
    ):
        folder, sent = server.context.store.directory, {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
        file_id = client.post("/v1/files", **sent).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        answered = client.post("/v1/responses", json={"input": "x"}).json()["id"]

        def check(found, status, reason):
            code = {507: "disk_full", 503: "store_failed"}[status]
            assert (found.status_code, found.json()["error"]["code"]) == (status, code)
            assert "data_directory" in found.json()["error"]["message"]
            assert reason in found.json()["error"]["message"]

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(stores.os, "fsync", full)
            check(client.post("/v1/files", **sent), 507, "No space left")
        assert [path.name for path in (folder / "files").iterdir()] == [file_id]
        db = server.context.store._db
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages}")
        check(client.post("/v1/batches", json={**batch, "metadata": {"x": "y" * 50_000}}), 507, "disk is full")
        db.execute("PRAGMA max_page_count = 1000000")
        with locked(server):
            for found in (
                client.post("/v1/files", **sent),
                client.post("/v1/batches", json=batch),
                client.delete(f"/v1/responses/{answered}"),
                client.delete(f"/v1/files/{file_id}"),
            ):
                check(found, 503, "database is locked")
        assert [path.name for path in (folder / "files").iterdir()] == [file_id]
        (folder / "files" / file_id).unlink()
        (folder / "files" / file_id).mkdir()
        check(client.delete(f"/v1/files/{file_id}"), 503, "Is a directory")
        assert client.delete(f"/v1/responses/{answered}").json()["deleted"]


def test_a_directory_is_of_servers_with_the_same_models(tmp_path):
    with closing(Store(tmp_path, 1000)) as first, closing(Store(tmp_path, 1000)) as replica:
        first.claim(["b", "a"])
        replica.claim(["a", "b"])
        first.close()
        with closing(Store(tmp_path, 1000)) as other:
            with pytest.raises(
                ConfigError, match=r'data_directory=.*a server of other models uses it \(\["a", "b"\]\)'
            ):
                other.claim(["a"])
            replica.close()
            other.claim(["a"])


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_the_place_of_the_database_is_not_followed(tmp_path, end, exists):
    place, other = tmp_path / "data" / f"foreword.sqlite{end}", tmp_path / "other"
    place.parent.mkdir()
    place.symlink_to(other)
    if exists:
        other.write_bytes(b"")
    reason = rf"data_directory=.*cannot be used \({re.escape(place.name)} is not a regular file: delete it\)"
    with pytest.raises(ConfigError, match=reason):
        Store(place.parent, 1000)
    assert not exists or other.read_bytes() == b""
    assert other.exists() == exists


@pytest.mark.parametrize("name", ["files", "batches"])
def test_a_link_in_the_place_of_a_folder_of_the_store_is_refused_by_name(tmp_path, name):
    (other := tmp_path / "other").mkdir()
    (place := tmp_path / "data" / name).parent.mkdir()
    place.symlink_to(other)
    with pytest.raises(
        ConfigError, match=rf"cannot be used \({name} is a link or a file in place of a folder: delete it"
    ):
        Store(place.parent, 1000)
    assert not list(other.iterdir())


@pytest.mark.parametrize("name", ["models.lock", "batches.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_only_a_regular_file_is_used_for_a_lock(tmp_path, name, kind):
    place, other = tmp_path / "data" / name, tmp_path / "other"
    place.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(other)
    if kind == "link":
        other.write_text("of another program")
    words = rf"data_directory=.*{name} must be a regular file .*Delete '{place}'"
    with closing(Store(place.parent, 1000)) as store, pytest.raises(ConfigError, match=words):
        store.claim(["a"])
    assert other.exists() == (kind == "link")
    assert kind != "link" or other.read_text() == "of another program"
