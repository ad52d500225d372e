"""tokenizer.json: loaded, and used for short and long texts."""

import json

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from foreword.models.tokenizer import Tokenizer
from fuzz.mutations import mutate_json
from fuzz.target import Target
from models import vocabularies

TEXTS = (
    "",
    "hello 12\n\n3 🙂<tool><|im_start|>",
    "e\N{COMBINING ACUTE ACCENT}" * 20,
    "a" * 30 + "b",
    " " * 500 + "x",
    "\0",
)


def backends():
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        yield Tokenizer.from_gguf(vocabularies.byte_level(pre, words=("he", "hello"))).backend
    yield Tokenizer.from_gguf(vocabularies.sentence_piece()).backend
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "hello": 3}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    yield words
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("▁a", -1.5)], 0, False))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    yield unigram


def valid():
    return [backend.to_str().encode() for backend in backends()]


def hostile():
    made = json.loads(valid()[0])
    patterns = ("(a+)+$", "(a|a)*b", "(?=", "\\p{", "a{100000}{1000}", "", "(?<=a+)b", "((((a*)*)*)*)*b")
    changes = [{"normalizer": {"type": "Replace", "pattern": {"Regex": p}, "content": "x"}} for p in patterns]
    changes += [{"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 10**6}}]
    changes += [{"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}}]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    changes += [{"pre_tokenizer": {**split, "pattern": {"Regex": p}}} for p in patterns]
    token = {"special": True, "single_word": False, "lstrip": True, "rstrip": True, "normalized": False}
    changes += [{"added_tokens": [{**token, "id": 2**32 - 1, "content": "a"}]}]
    changes += [{"added_tokens": [{**token, "id": 1, "content": ""}]}]
    return [json.dumps({**made, **change}).encode() for change in changes]


def read(data, folder):
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer.from_directory(folder)
    for text in TEXTS:
        for parse_special in (True, False):
            tokenizer.decode(tokenizer.encode(text, parse_special=parse_special))
    tokenizer.decode([0, 1, 10**6, 2**32 - 1])


TARGET = Target(valid, read, mutate_json, hostile)
