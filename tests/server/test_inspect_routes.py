"""`/inspect`: the live page, and the steps that it asks for."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from server_rig import HI, serving

from foreword.insight import Replay, Step, Trace
from foreword.insight.live import LiveSteps
from foreword.insight.token_text import shown_text
from foreword.server import inspector

ADMIN = {"Authorization": "Bearer boss"}
USER = {"Authorization": "Bearer user"}
CHAT = {"messages": HI, "max_tokens": 12, "temperature": 0}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch):
    """Each answer is up to the last step."""
    monkeypatch.setattr(inspector, "SHORTEST", 0.0)


def talk(server, **body):
    assert server.post("/v1/chat/completions", {**CHAT, **body}, headers=USER).status_code == 200


def index_of(server, **headers):
    response = server.get("/inspect/steps", headers=headers or ADMIN)
    assert response.status_code == 200, response.text
    return response.json()


def steps_of(server, index):
    """The steps of all parts."""
    parts = [server.get(f"/inspect/steps/{index['epoch']}/s{i}", headers=ADMIN) for i in range(len(index["starts"]))]
    assert all(part.status_code == 200 for part in parts)
    return [step for part in parts for step in part.json()["steps"]]


@pytest.fixture(scope="module")
def keyed(talker):
    with serving(talker, api_key=("user",), admin_key="boss") as server:
        talk(server)
        yield server


def test_the_page_needs_no_key_and_has_no_data(keyed):
    response = keyed.get("/inspect")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "unsafe" not in response.headers["content-security-policy"]
    assert 'id="index"' not in response.text


@pytest.mark.parametrize("path", ["/inspect/steps", "/inspect/steps/1/s0", "/inspect/steps/1/b1"])
def test_the_steps_need_the_admin_key(keyed, path):
    index_of(keyed)
    assert keyed.get(path).status_code == 401
    assert keyed.get(path, headers=USER).status_code == 401
    assert keyed.get(path, headers=ADMIN).status_code == 200


def test_the_steps_are_those_that_a_replay_of_the_ring_prepares(keyed, tmp_path):
    talk(keyed, max_tokens=30)
    keyed.check_nothing_is_left()
    index, recorder = index_of(keyed), keyed.llm.engine.recorder
    recorder._ring.write(tmp_path / "ring.jsonl", recorder.header("plain"))
    trace = Trace.read(tmp_path / "ring.jsonl")
    replay, shown = Replay(trace.header, backend="loops"), iter(steps_of(keyed, index))
    for event in trace.events:
        batch = replay.apply(event)
        if isinstance(event, Step):
            step = next(shown)
            assert [index["requests"]["ids"][r] for r in step["requests"]] == list(batch.req_ids)
            for name in ("input_ids", "positions", "seq_lens", "logits_indices"):
                assert step["tensors"][name] == getattr(batch, name).tolist(), name
            assert step["tensors"]["slot_mapping"][0] == batch.slot_mapping[0].tolist()
    assert next(shown, None) is None
    assert all(step["sampled"] for step in steps_of(keyed, index)[-3:])


def test_tokens_have_the_texts_of_the_tokenizer(keyed):
    index = index_of(keyed)
    part = keyed.get(f"/inspect/steps/{index['epoch']}/s0", headers=ADMIN).json()
    for token, text in part["texts"].items():
        assert text == shown_text(keyed.llm.tokenizer.token_bytes(int(token)))
    assert {str(token) for step in part["steps"] for token in step["tensors"]["input_ids"]} <= part["texts"].keys()


def test_the_content_of_a_block_is_what_the_steps_wrote(keyed):
    index, expected = index_of(keyed), {}
    size = index["groups"][0]["block_size"]
    for step in steps_of(keyed, index):
        x = step["tensors"]
        for slot, token in zip(x["slot_mapping"][0], x["input_ids"], strict=True):
            if slot >= 0:
                expected.setdefault(slot // size, {})[slot % size] = token
    for block, slots in expected.items():
        answer = keyed.get(f"/inspect/steps/{index['epoch']}/b{block}", headers=ADMIN).json()
        got = {}
        for *_, offset, _, tokens in answer["blocks"][0]:
            got |= {offset + k: token for k, token in enumerate(tokens)}
        assert got == slots


def test_new_steps_follow_the_old_ones_in_the_same_epoch(keyed):
    before = index_of(keyed)
    talk(keyed)
    after = index_of(keyed)
    count = len(before["steps"]["number"])
    assert after["epoch"] == before["epoch"]
    assert after["version"] > before["version"]
    assert after["steps"]["number"][:count] == before["steps"]["number"]
    assert len(after["steps"]["number"]) > count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("has_admin_key", [True, False])
def test_the_steps_say_what_was_reused_and_why_not_more(talker, has_admin_key):
    """Without an admin key, not that there is content under another salt."""
    with serving(talker, api_key=("user",), **({"admin_key": "boss"} if has_admin_key else {})) as server:
        usages = []
        for salt in ("one", "one", "two"):
            body = {**CHAT, "cache_salt": salt}
            answer = server.post("/v1/chat/completions", body, headers=USER)
            usages.append(answer.json()["usage"])
        index = index_of(server, **(ADMIN if has_admin_key else USER))
    found = [line[2:] for log in index["requests"]["logs"] for line in log if line[1] == "added"]
    reused = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert [tokens for tokens, _ in found] == reused
    assert reused[1] > 0
    assert found[2] == [0, "salt at 0" if has_admin_key else "never_computed at 0"]
    assert index["misses"]["salt"]


@pytest.mark.parametrize("path", ["9/s0", "1/s999", "1/x", "1/s", "1/s-1", "x/s0", "1/s" + "9" * 40, "1/s²"])
def test_a_part_that_is_not_kept_is_not_found(keyed, path):
    index_of(keyed)
    assert keyed.get(f"/inspect/steps/{path}", headers=ADMIN).status_code == 404


def test_without_an_admin_key_the_steps_have_no_token_ids(talker):
    with serving(talker, api_key=("user",)) as server:
        talk(server)
        index = index_of(server, **USER)
        part = server.get(f"/inspect/steps/{index['epoch']}/s0", headers=USER).json()
        block = server.get(f"/inspect/steps/{index['epoch']}/b{index['blocks']['ids'][0]}", headers=USER).json()
    assert index["token_ids"] == "omitted"
    assert "texts" not in part
    assert all("input_ids" not in step["tensors"] for step in part["steps"])
    assert {token for step in part["steps"] for _, tokens in step["sampled"] for token in tokens} <= {0}
    assert all(isinstance(write[-1], int) for write in block["blocks"][0])


def test_an_engine_that_keeps_no_steps_says_so(talker):
    with serving(talker, engine={"flight_steps": 0}) as server:
        response = server.get("/inspect/steps")
    assert response.status_code == 404
    assert "--flight-steps" in response.json()["error"]["message"]


def test_steps_that_fell_out_of_the_ring_begin_another_epoch(talker):
    with serving(talker, engine={"flight_steps": 16}, admin_key="boss") as server:
        talk(server, max_tokens=20)
        first = index_of(server)
        talk(server, max_tokens=120)
        later = index_of(server)
        gone = server.get(f"/inspect/steps/{first['epoch']}/s0", headers=ADMIN)
        shown = steps_of(server, later)
    assert later["epoch"] == first["epoch"] + 1
    assert not later["damage"]
    assert gone.status_code == 404
    assert 16 <= len(shown) <= 32
    assert later["steps"]["number"][-1] == server.llm.engine.recorder._num_steps


@pytest.mark.long
def test_the_engine_goes_on_while_its_steps_are_followed(keyed):
    """Requests and pages at the same time: every answer is complete, and the last index has every step."""
    done = threading.Event()

    def poll():
        while not done.is_set():
            index = index_of(keyed)
            keyed.get(f"/inspect/steps/{index['epoch']}/s{len(index['starts']) - 1}", headers=ADMIN)

    pages = [threading.Thread(target=poll) for _ in range(3)]
    for page in pages:
        page.start()
    for seed in np.random.default_rng(1).integers(0, 100, 6).tolist():
        talk(keyed, max_tokens=20, seed=seed, temperature=1)
    done.set()
    for page in pages:
        page.join()
    keyed.check_nothing_is_left()
    assert index_of(keyed)["steps"]["number"][-1] == keyed.llm.engine.recorder._num_steps


def test_what_is_shown_begins_again_after_a_bounded_number_of_steps(talker, monkeypatch):
    monkeypatch.setattr("foreword.insight.live.MAX_STEPS", 20)
    with serving(talker, admin_key="boss") as server:
        talk(server, max_tokens=30)
        recorder = server.llm.engine.recorder
        live = LiveSteps(recorder, "x", "plain", str)
        live.follow(recorder.recent(live.place))
        assert live.place is None


def test_an_answer_holds_for_all_who_ask_soon_after(keyed, monkeypatch):
    before = index_of(keyed)
    monkeypatch.setattr(inspector, "SHORTEST", 100.0)
    talk(keyed)
    assert index_of(keyed) == before


def test_a_client_that_leaves_lets_no_second_replay_begin(keyed, monkeypatch):
    running, most, begun, go = [], [], threading.Event(), threading.Event()
    follow = LiveSteps.follow

    def slow(live, recent):
        running.append(1)
        most.append(len(running))
        begun.set()
        assert go.wait(60)
        follow(live, recent)
        running.pop()

    monkeypatch.setattr(LiveSteps, "follow", slow)
    with keyed.client() as client, pytest.raises(httpx.ReadTimeout):
        client.get("/inspect/steps", headers=ADMIN, timeout=httpx.Timeout(60, read=0.05))
    assert begun.wait(60)
    talk(keyed)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(index_of, keyed)
        time.sleep(0.1)  # a second replay would begin meanwhile
        go.set()
        second.result(60)
    assert set(most) == {1}
