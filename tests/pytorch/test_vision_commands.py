"""`foreword run --image` and `/image` of a chat, with a model that sees."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("torch", reason="needs the extra foreword[torch]")
pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[vision]")

from cli.processes import run
from foreword import LLM, SamplingParams
from foreword.cli.conversation import Conversation
from models.seeing import image
from pytorch.vision_models import save

OPTIONS = ("--max-model-len", 160, "--num-threads", 1, "--max-tokens", 8, "--ignore-eos")


def test_the_images_of_commands_are_seen_in_their_order(tmp_path):
    folder, talk = tmp_path / "llava", tmp_path / "talk.json"
    save(folder, "llava")
    files = [tmp_path / "a.png", tmp_path / "b c.png"]
    pictures = [image(0, 60, 40), image(1, 30, 84)]
    for file, picture in zip(files, pictures, strict=True):
        picture.save(file)
    parts = [{"type": "image", "image": picture} for picture in pictures]
    with LLM(folder, max_model_len=160, num_threads=1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        expected = [
            llm.chat([{"role": "user", "content": [*seen, {"type": "text", "text": "what"}]}], params)[0]
            for seen in (parts, parts[:1])
        ]
    assert expected[0].prompt_token_ids != expected[1].prompt_token_ids

    seen = ("--image", files[0], "--image", files[1])
    status, shown, error = run("run", "what", "-m", folder, *seen, "--json", *OPTIONS)
    assert status == 0, error
    assert json.loads(shown)["prompt_token_ids"] == expected[0].prompt_token_ids
    assert json.loads(shown)["token_ids"] == expected[0].outputs[0].token_ids

    typed = [f"/image {files[0]}", f"/image '{files[1]}'", "/clear", f"/image {files[0]}", "what", f"/save {talk}"]
    typed += ["/undo", f"/image {tmp_path}/no.png"]
    status, shown, error = run("chat", "-m", folder, *OPTIONS, input="\n".join(typed).encode())
    assert status == 2
    assert "image 2 of the next message: b c.png, 30 × 84 pixels" in shown
    assert "removed: [image] what" in shown
    assert re.search(r"/image '.*no\.png'.*: file not found", error)  # a long path is shortened
    kept = Conversation()
    kept.load(talk)
    assert kept.messages[0]["content"][0] == {"type": "image", "image": str(files[0])}
    assert kept.messages[1]["content"] == expected[1].outputs[0].text
