"""Conversations that clients of llama.cpp save to files and restore: nothing is computed again, or read elsewhere."""

import json
import os

import pytest
from server_rig import serving
from talking_model import write_talking_model

PROMPT = "abcdefghij" * 12  # 120 tokens
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def act(server, action: str, name: object = "talk.bin", slot: object = 0):
    body = {} if action == "erase" else {"filename": name}
    return server.post(f"/slots/{slot}?action={action}", body)


def cached(server, prompt: str = PROMPT, **more) -> tuple[str, dict]:
    answer = server.post("/v1/completions", {**BODY, "prompt": prompt, **more}).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]


def test_a_saved_conversation_goes_on_in_another_server(talker, folder):
    with serving(talker, slot_save_path=str(folder)) as server:
        text, details = cached(server)
        assert details["cached_tokens"] == 0
        saved = act(server, "save").json()
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (0, "talk.bin", 124)
        assert saved["n_written"] == (folder / "talk.bin").stat().st_size
        assert saved["timings"]["save_ms"] > 0
    with serving(talker, slot_save_path=str(folder)) as server:
        restored = act(server, "restore").json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        assert server.get("/slots").json()[0]["n_tokens"] == 124
        again, details = cached(server, PROMPT + text + "k")
        assert details["loaded_tokens"] == {"slots": 112}
        assert again == cached(server, PROMPT + text + "k")[0]
        server.check_nothing_is_left()


def test_a_restored_conversation_can_be_erased_and_saved_again(talker, folder):
    with serving(talker, slot_save_path=str(folder), engine={"max_num_seqs": 3}) as server:
        cached(server)
        first = act(server, "save").json()
        assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
        act(server, "restore", slot=2)
        assert [one["n_tokens"] for one in server.get("/slots").json()] == [124, 0, 124]
        second = act(server, "save", "copy.bin", slot=2).json()
        assert (second["n_saved"], second["n_written"]) == (first["n_saved"], first["n_written"])
        assert act(server, "erase", slot=2).json() == {"id_slot": 2, "n_erased": 124}
        assert "loaded_tokens" not in cached(server)[1]


def test_a_salt_is_part_of_a_conversation(talker, folder):
    with serving(talker, slot_save_path=str(folder)) as server:
        cached(server, cache_salt="mine")
        act(server, "save")
        assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
        act(server, "restore", slot=5)
        assert "loaded_tokens" not in cached(server)[1]
        assert cached(server, cache_salt="mine")[1]["loaded_tokens"] == {"slots": 112}


NAMES = ("", "../talk.bin", "/etc/passwd", "a/b", "a\\b", ".hidden", "..", "x\0y", "line\n", "x" * 300, 7, None, ["a"])


@pytest.mark.long
def test_files_elsewhere_are_refused(talker, folder):
    (folder / "saved").mkdir()
    with serving(talker, slot_save_path=str(folder / "saved")) as server:
        cached(server)
        for name in NAMES:
            for action in ("save", "restore"):
                response = act(server, action, name)
                assert response.status_code == 400
                assert "filename" in json.dumps(response.json())
    assert [path.name for path in folder.iterdir()] == ["saved"]
    assert not list((folder / "saved").iterdir())


@pytest.mark.long
def test_what_is_no_slot_file_is_refused_and_nothing_is_lost(talker, folder):
    with serving(talker, slot_save_path=str(folder)) as server:
        text, _ = cached(server)
        act(server, "save")
        whole = (folder / "talk.bin").read_bytes()
        (folder / "text.bin").write_text("a text")
        (folder / "cut.bin").write_bytes(whole[:-100])
        (folder / "changed.bin").write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        os.symlink(talker / "config.json", folder / "link.bin")
        os.mkfifo(folder / "pipe.bin")  # no process writes to it
        (folder / "folder.bin").mkdir()
        for name in ("text.bin", "cut.bin", "changed.bin", "link.bin", "missing.bin", "pipe.bin", "folder.bin"):
            response = act(server, "restore", name)
            assert response.status_code == 400, name
            assert str(folder) not in response.text
        for slot in (-1, 256, "a", "1e3"):
            assert act(server, "save", slot=slot).status_code == 400
        assert act(server, "save", slot=9).status_code == 400  # no request ran there
        assert act(server, "dance").status_code == 400
        assert cached(server)[0] == text


def test_what_a_query_or_a_body_has_is_followed_or_refused(talker, folder):
    with serving(talker, slot_save_path=str(folder)) as server:
        cached(server)
        act(server, "save")
        for path, body, param in (
            ("/slots/0?action=erase&action=save", {}, "action"),
            ("/slots/0?action=save&action=save", {"filename": "talk.bin"}, "action"),
            ("/slots/0?action=restore&model=talker", {"filename": "talk.bin"}, "model"),
            ("/slots/0?action=erase&x=1", {}, "x"),
            ("/slots/0?action=erase", {"filename": "talk.bin"}, "filename"),
        ):
            response = server.post(path, body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        for query in ("x=1", "model=talker&model=talker"):
            assert server.get(f"/slots?{query}").status_code == 400
        assert server.get("/slots?model=talker").json()[0]["n_tokens"] == 124
        assert act(server, "erase").json()["n_erased"] == 124


def test_without_the_setting_nothing_is_saved(talker, folder):
    with serving(talker, api_key=("one",), admin_key="root") as server:
        admin = {"headers": {"Authorization": "Bearer root"}}
        response = server.post("/slots/0?action=save", {"filename": "a"}, **admin)
        assert response.status_code == 403
        assert "--slot-save-path" in response.text
        assert server.post("/slots/0?action=save", {"filename": "a"}).status_code == 401
        slots = server.get("/slots", **admin).json()
        assert (slots[0]["id"], slots[0]["is_processing"], len(slots)) == (0, False, 256)


def test_a_file_of_another_model_is_refused(talker, folder, tmp_path_factory):
    other = write_talking_model(tmp_path_factory.mktemp("other") / "model", 8192)
    with serving(other, slot_save_path=str(folder)) as server:
        cached(server)
        assert act(server, "save").status_code == 200
    with serving(talker, slot_save_path=str(folder)) as server:
        response = act(server, "restore")
        assert response.status_code == 400
        assert "is not a file of blocks of this model" in response.text
