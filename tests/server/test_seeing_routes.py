"""Images over HTTP on a server without PyTorch."""

import pytest

pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from server_rig import serving

from models.seeing import A, B, data_url, recorded, write_seeing_model


@pytest.mark.parametrize("name", ["idefics3", "gemma3"])
def test_a_server_answers_about_images_as_transformers_does(tmp_path, name):
    record = recorded()[name]
    write_seeing_model(tmp_path, record)
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in (A, B)]
    content = [parts[0], {"type": "text", "text": "what"}, parts[1]]
    with serving(tmp_path, engine={"max_model_len": 160, "block_size": 4}) as server:
        body = {
            "model": "talker", "temperature": 0.0, "ignore_eos": True, "max_tokens": 12,
            "messages": [{"role": "user", "content": content}],
        }  # fmt: skip
        answer = server.post("/v1/chat/completions", body).json()
        assert answer["usage"]["prompt_tokens"] == len(record["prompts"][0])
        assert answer["choices"][0]["message"]["content"] == server.llm.tokenizer.decode(record["tokens"][0])
        body["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        refused = server.post("/v1/chat/completions", body)
        assert refused.status_code == 400
        assert "messages[0].content[0]" in refused.text
        for route in ("/tokenize", "/apply-template"):
            refused = server.post(route, {"messages": [{"role": "user", "content": content[1:]}]})
            assert refused.status_code == 400
            assert "messages[0].content[1] = 'image_url': this route takes text only" in refused.text
        image = {"type": "input_image", "image_url": parts[0]["image_url"]["url"], "detail": "low"}
        refused = server.post("/v1/responses", {"model": "talker", "input": [{"role": "user", "content": [image]}]})
        assert refused.status_code == 400
        assert "or give 'auto' or 'high' or 'original'" in refused.text
