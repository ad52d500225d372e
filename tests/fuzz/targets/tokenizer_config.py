"""tokenizer_config.json and generation_config.json, which are read with the same names here, and their templates."""

import json

from foreword.models.tokenizer import Tokenizer
from fuzz.mutations import mutate_json
from fuzz.target import Target
from models import vocabularies

CONFIG = {
    "bos_token": {"content": "<|im_start|>", "special": True},
    "eos_token": "<|im_end|>",
    "eos_token_id": [1, 2],
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"}],
}


def valid():
    return [json.dumps(CONFIG).encode(), json.dumps({**CONFIG, "chat_template": "{{ bos_token }}"}).encode()]


def hostile():
    changes = ({"bos_token": "\ud800"}, {"eos_token": "\ud800"}, {"pad_token": "\ud800"}, {"bos_token": "a" * 10**7})
    return [json.dumps({**CONFIG, **change}).encode() for change in changes]


def read(data, folder):
    if not (folder / "tokenizer.json").exists():
        Tokenizer.from_gguf(vocabularies.byte_level()).backend.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config", "generation_config"):
        (folder / f"{name}.json").write_bytes(data)
    tokenizer = Tokenizer.from_directory(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    tokenizer.decode(tokenizer.encode(text))


TARGET = Target(valid, read, mutate_json, hostile)
