"""A server tells the sampling that its model suggests, and bodies that leave it open have it."""

import json
import shutil

import pytest
from server_rig import serving

BODIES = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    "/v1/responses": {"input": "ab"},
}


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    folder = shutil.copytree(talker, tmp_path_factory.mktemp("suggesting") / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 3}))
    with serving(folder) as server:
        yield server


def test_the_description_of_the_model_has_its_suggestions(server):
    suggested = {"temperature": 0.0, "max_tokens": 3}
    assert server.get("/v1/models").json()["data"][0]["default_sampling_params"] == suggested
    assert server.get("/v1/models/talker").json()["default_sampling_params"] == suggested
    assert server.llm.engine.notes == [
        "the model suggests temperature = 0, max_tokens = 3: requests have that unless they give their own"
    ]


@pytest.mark.parametrize("path", BODIES)
def test_a_body_has_what_it_leaves_open_from_the_model(server, path):
    def answer(**own):
        found = server.post(path, {**BODIES[path], **own}).json()
        usage = found["usage"]
        texts = found.get("choices") or [item["content"] for item in found["output"]]
        return usage.get("completion_tokens", usage.get("output_tokens")), texts

    count, texts = answer(seed=1)
    assert count == 3
    assert answer(seed=2) == (count, texts), "greedy answers do not depend on the seed"
    assert answer(seed=1, temperature=50.0) != (count, texts)


def test_messages_have_their_own_limit(server):
    body = {"model": "talker", "max_tokens": 5, "messages": [{"role": "user", "content": "ab"}]}
    assert server.post("/v1/messages", body).json()["usage"]["output_tokens"] == 5
