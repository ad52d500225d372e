"""Vocabularies of tiktoken in directories of Kimi, against the token ids that tiktoken gives."""

import base64
import json
from pathlib import Path

import pytest

from foreword.errors import ModelError
from foreword.models.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "models" / "ranks.json").read_text())["cases"]
KIMI = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


def write(folder, case, lines=None, **changes):
    lines = [f"{token} {rank}" for rank, token in enumerate(case["ranks"])] if lines is None else lines
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {
        str(token_id): {"content": text, "normalized": False, "special": text != "<think>"}
        for text, token_id in case["special"].items()
    }
    config = {"auto_map": KIMI, "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_token_ids_of_tiktoken(tmp_path, case):
    tokenizer = Tokenizer.from_directory(write(tmp_path, case))
    assert tokenizer.vocab_size == len(case["ranks"]) + 256
    assert tokenizer.eos_ids[0] == case["special"]["[EOS]"]
    for text, ids in zip(case["texts"], case["ids"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def lines_of(case, changes):
    lines = [f"{token} {rank}" for rank, token in enumerate(case["ranks"])]
    for number, line in changes.items():
        lines[number] = line
    return lines


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({3: "%%% 3"}, "line 4 is b'%%% 3', not a token in base64 and its rank"),
        ({3: "QUJD"}, "line 4 is b'QUJD', not a token"),
        ({3: "QUJD three"}, "line 4 is b'QUJD three', not a token"),
        (
            {3: base64.b64encode(b"abcxyz").decode() + " 3"},
            "not those from 0 of different tokens, among them every byte",
        ),
        ({359: base64.b64encode(b"abcxyz").decode() + " 900"}, "not those from 0 of different tokens"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, changes, reason):
    with pytest.raises(ModelError, match=rf"tiktoken\.model: .*{reason}"):
        Tokenizer.from_directory(write(tmp_path, CASES[0], lines_of(CASES[0], changes)))


@pytest.mark.parametrize("auto_map", [None, {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}, "x"])
def test_the_tokenizer_of_another_class_is_refused(tmp_path, auto_map):
    with pytest.raises(ModelError, match=r"auto_map is .* supported with the tokenizer tokenization_kimi"):
        Tokenizer.from_directory(write(tmp_path, CASES[0], auto_map=auto_map))


def test_an_added_token_with_an_id_of_the_ranks_is_refused(tmp_path):
    added = {"5": {"content": "[X]", "special": True}}
    with pytest.raises(ModelError, match=r"added_tokens_decoder gives '\[X\]' the id 5"):
        Tokenizer.from_directory(write(tmp_path, CASES[0], added_tokens_decoder=added))
