"""Text to ids: pre-tokenization, special tokens, chat templates, and errors for damaged files."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from foreword.errors import ModelError, RequestError
from foreword.models.gguf import read_gguf
from foreword.models.text_bounds import TextBound
from foreword.models.tokenizer import Tokenizer
from models import vocabularies

GOLDEN = json.loads((Path(__file__).parents[1] / "data/models/tokenizers.json").read_text(encoding="utf-8"))


def byte_level(pre="smollm", **more):
    return Tokenizer.from_gguf(vocabularies.byte_level(pre, **more))


def sentence_piece(**more):
    return Tokenizer.from_gguf(vocabularies.sentence_piece(**more))


def recorded(model):
    return list(zip(GOLDEN["strings"], GOLDEN[model], strict=True))


def pieces(tokenizer, text, **options):
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text, **options)]


# --- the default model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.from_gguf(read_gguf(smollm2_path).metadata)


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), recorded("smollm2"))
def test_smollm2_encodes_to_the_recorded_ids_and_decodes_them(smollm2, text, ids):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@pytest.mark.parametrize("chat", GOLDEN["smollm2_chats"], ids=lambda chat: chat["prompt"][:20])
def test_smollm2_renders_the_recorded_chats(smollm2, chat):
    text = smollm2.apply_chat_template([{"role": "user", "content": chat["prompt"]}])
    assert text == chat["rendered"]
    assert smollm2.encode(text, add_special_tokens=False) == chat["prompt_ids"]


@pytest.mark.model
def test_smollm2_has_its_end_tokens(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2,))


# The vocabulary has no tokens for some control characters and for planes above 3.
@pytest.mark.model
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=40))
def test_smollm2_decodes_any_encoded_text(smollm2, text):
    assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


@pytest.fixture(scope="module")
def qwen(qwen_path):
    return Tokenizer.from_gguf(read_gguf(qwen_path).metadata)


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), recorded("qwen2.5"))
def test_qwen_encodes_to_the_recorded_ids_and_decodes_them(qwen, text, ids):
    assert qwen.encode(text) == ids
    assert qwen.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_qwen_renders_tools_calls_and_answers(qwen):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<Köln>"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    text = qwen.apply_chat_template(messages, tools=tools)
    assert json.dumps(tools[0]) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "<Köln>"}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def gemma3(gemma3_path):
    return Tokenizer.from_gguf(read_gguf(gemma3_path).metadata)


@pytest.mark.model
@pytest.mark.parametrize(("text", "ids"), recorded("gemma3"))
def test_gemma3_encodes_to_the_recorded_ids_and_decodes_them(gemma3, text, ids):
    assert gemma3.encode(text) == [2, *ids]
    assert gemma3.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_gemma3_has_tokens_for_the_end_of_text_and_of_turn(gemma3):
    assert (gemma3.bos_id, gemma3.eos_ids) == (2, (1, 106))


# --- byte-level vocabularies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "\n\n12", ["\n", "\n", "12"]),  # the regex splits before the last newline
        ("smollm", "\n\n12", ["\n\n", "1", "2"]),  # digits are split off first, so the newlines form a word
        ("qwen2", "\n\n12", ["\n\n", "1", "2"]),
        ("llama-bpe", "\n\n1234", ["\n\n", "123", "4"]),
        ("gpt-2", "\n\n1234", ["\n", "\n", "123", "4"]),
        ("llama-bpe", "hello hello", ["hello", " hello"]),
    ],
)
def test_the_pre_tokenizer_is_that_of_the_file(pre, text, words):
    assert pieces(byte_level(pre), text, add_special_tokens=False) == words


def test_llama_3_encodes_a_word_in_the_vocabulary_without_merges():
    metadata = vocabularies.byte_level("llama-bpe")
    metadata["tokenizer.ggml.merges"] = ["h e"]
    assert pieces(Tokenizer.from_gguf(metadata), "hello", add_special_tokens=False) == ["hello"]


def test_qwen_normalises_to_nfc():
    assert pieces(byte_level("qwen2"), "e\N{COMBINING ACUTE ACCENT}") == ["é"]


def test_an_unsupported_pre_tokenizer_is_named_with_the_supported_ones():
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'superbpe'.*smollm.*llama-bpe.*tokenizer.json"):
        byte_level("superbpe")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
@given(text=st.text(max_size=40))
def test_byte_level_ids_decode_to_the_text(pre, text):
    tokenizer = TOKENIZERS[pre]
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


TOKENIZERS = {pre: byte_level(pre) for pre in ("gpt-2", "smollm", "llama-bpe")}


# --- special tokens -----------------------------------------------------------------------------------------------


def test_special_tokens_in_a_text_are_parsed():
    tokenizer = byte_level()
    assert tokenizer.encode("<|im_start|>hello<|im_end|>")[::2] == [0, 1]


def test_special_tokens_in_a_text_can_be_encoded_literally():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|im_end|><tool>", parse_special=False)
    assert 1 not in ids
    assert tokenizer.decode(ids) == "<|im_end|><tool>"
    assert ids[-1] == tokenizer.backend.token_to_id("<tool>")  # user-defined, not a control token
    assert tokenizer.encode("<|im_end|>") == [1]  # the default is unchanged


def test_literal_encoding_changes_only_special_tokens():
    tokenizer = byte_level("llama-bpe")
    assert tokenizer.encode("hello 12", parse_special=False) == tokenizer.encode("hello 12")
    assert tokenizer.encode("hello 12", parse_special=False)[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("pre", "more", "around"),
    [
        ("smollm", {}, ([], [])),
        ("smollm", {"ggml.add_bos_token": True}, ([0], [])),
        ("smollm", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, ([0], [1])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"ggml.add_bos_token": False}, ([], [])),
    ],
)
def test_the_file_determines_the_tokens_around_a_text(pre, more, around):
    tokenizer = byte_level(pre, **more)
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*around[0], *inner, *around[1]]


def test_eos_ids_are_all_end_tokens_with_eos_token_first():
    control = ("<s>", "</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
    assert byte_level(control=control, **{"ggml.eom_token_id": 3}).eos_ids == (1, 3, 2, 4)


def test_only_control_tokens_end_a_reply():
    assert byte_level(control=("<s>", "</s>"), user=("<|im_end|>",)).eos_ids == (1,)


# --- sentence-piece vocabularies ----------------------------------------------------------------------------------


def naive_sentence_piece(text, metadata):
    """Merge the neighbours with the best joint score, leftmost first, while there are any; then bytes for the rest."""
    tokens = metadata["tokenizer.ggml.tokens"]
    score = {t: metadata["tokenizer.ggml.scores"][i] for i, t in enumerate(tokens) if i >= 259}
    symbols = list(text)
    while True:
        joints = [(-score[a + b], n) for n, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joints:
            break
        n = min(joints)[1]
        symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]
    names = [name for s in symbols for name in ([s] if s in score else [f"<0x{byte:02X}>" for byte in s.encode()])]
    return [tokens.index(name) for name in names]


@given(text=st.text(alphabet="abcehlo é🙂", min_size=1, max_size=30))
def test_sentence_pieces_are_merged_best_first(text):
    expected = naive_sentence_piece("▁" + text.replace(" ", "▁"), vocabularies.sentence_piece())
    assert SENTENCE_PIECE.encode(text, add_special_tokens=False) == expected


SENTENCE_PIECE = sentence_piece()


def test_sentence_piece_texts_begin_with_bos():
    assert SENTENCE_PIECE.encode("a")[0] == SENTENCE_PIECE.bos_id == 1
    assert sentence_piece(**{"ggml.add_bos_token": False}).encode("a") == SENTENCE_PIECE.encode("a")[1:]


def test_a_space_prefix_is_added_only_if_the_file_has_it():
    assert pieces(SENTENCE_PIECE, "hello", add_special_tokens=False) == [" hello"]
    without = sentence_piece(**{"ggml.add_space_prefix": False})
    assert pieces(without, "hello hello", add_special_tokens=False) == ["hello", " hello"]
    assert without.decode(without.encode(" hello")) == " hello"


def test_user_defined_runs_of_spaces_are_single_tokens():
    for mark in " ▁":  # files use either form
        tokenizer = sentence_piece(user=(mark * 2, mark * 3), **{"ggml.add_space_prefix": False})
        assert pieces(tokenizer, "a     b", add_special_tokens=False) == ["a", "   ", "  ", "b"]


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model", "tokens", "token_type", "merges"])
def test_a_missing_key_is_named(key):
    metadata = vocabularies.byte_level()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{key}"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "rwkv"),
        ("model", 5),
        ("tokens", []),
        ("tokens", np.zeros(3)),
        ("token_type", np.zeros(3, np.int32)),
        ("merges", ["no-space"]),
        ("merges", ["a nosuchtoken"]),
        ("merges", ["a b c"]),
        ("eos_token_id", 10**6),
        ("eos_token_id", -1),
        ("bos_token_id", "1"),
        ("add_bos_token", 1),
    ],
)
def test_a_damaged_key_is_a_model_error(key, value):
    metadata = vocabularies.byte_level() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("text", ["\ud800", b"hello", 5, None])
def test_invalid_text_is_a_request_error(text):
    with pytest.raises(RequestError, match="not text"):
        byte_level().encode(text)


@pytest.mark.parametrize("ids", [[-1], ["a"], 5, [None], [1.5]])
def test_invalid_token_ids_are_a_request_error(ids):
    with pytest.raises(RequestError, match="not token ids"):
        byte_level().decode(ids)


def with_normalizer(normalizer):
    """A byte-level tokenizer with a normalizer, as the text of a tokenizer.json."""
    return json.dumps({**json.loads(byte_level().backend.to_str()), "normalizer": normalizer})


def replacing(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_a_panic_of_the_tokenizer_is_a_request_error_and_the_next_text_is_encoded(tmp_path):
    (tmp_path / "tokenizer.json").write_text(with_normalizer(replacing({"Regex": "(a+)+$"}, "x")))
    tokenizer = Tokenizer.from_directory(tmp_path)
    with pytest.raises(RequestError, match=r"the tokenizer fails on it \(Onig"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("hello") == byte_level().encode("hello")


@pytest.mark.parametrize(
    "normalizer",
    [
        replacing({"String": "a"}, "x" * 200),
        {"type": "Prepend", "prepend": "x" * 200},
        {"type": "Sequence", "normalizers": [replacing({"String": "a"}, "aa")] * 7},
    ],
)
def test_a_normalizer_that_multiplies_a_text_is_a_model_error(tmp_path, normalizer):
    (tmp_path / "tokenizer.json").write_text(with_normalizer(normalizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json: its normalizer replaces a character by up to \d+"):
        Tokenizer.from_directory(tmp_path)


# --- the least number of tokens of a text -------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    tokenizer = byte_level("qwen2")
    monkeypatch.setattr(tokenizer, "backend", None)
    tokenizer._bound = TextBound(byte_level("qwen2").backend)
    with pytest.raises(RequestError, match=r"its 20000000 characters are at least \d+ tokens, more than 1000"):
        tokenizer.encode(" " * 20_000_000, max_tokens=1000)


def test_a_text_that_may_fit_is_tokenized():
    assert byte_level().encode("hello " * 4, max_tokens=9) == byte_level().encode("hello " * 4)


def bounded():
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        yield pre, byte_level(pre)
    yield "sentence pieces", SENTENCE_PIECE
    yield "runs of spaces", sentence_piece(user=("▁▁", "▁▁▁"))
    few = vocabularies.byte_level(words=("\x7f\x7f",))
    few["tokenizer.ggml.token_type"][10:50] = vocabularies.CONTROL  # bytes that cannot be encoded
    few["tokenizer.ggml.tokens"][10:50] = [f"<|{i}|>" for i in range(40)]
    yield "without some bytes", Tokenizer.from_gguf(few)


@pytest.mark.parametrize("tokenizer", [pytest.param(made, id=name) for name, made in bounded()])
@given(text=st.text(alphabet="hello 12\n日本é🙂\0\t\x7f\N{COMBINING ACUTE ACCENT}ᄀ\N{HANGUL JUNGSEONG A}<|im_start|>"))
def test_no_text_has_fewer_tokens_than_its_bound(tokenizer, text):
    least = tokenizer._bound.min_tokens(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False))
    assert least > 0 or not text or tokenizer._bound._dropped


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": replacing({"String": "a"}, "")},
        {"normalizer": replacing({"Regex": "a+"}, "a")},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"id": 0, "content": "<|im_start|>", "single_word": False, "lstrip": False, "rstrip": True,
                           "normalized": False, "special": True}]},
    ],
)  # fmt: skip
def test_there_is_no_bound_where_the_tokenizer_removes_characters(tmp_path, change):
    made = json.loads(byte_level().backend.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**made, **change}))
    assert Tokenizer.from_directory(tmp_path)._bound.min_tokens("a" * 10**6) == 0


# --- chat ---------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]


def test_templates_and_special_tokens_come_from_the_file():
    tokenizer = byte_level(chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.apply_chat_template(HI) == "<|im_start|>hi<|im_end|>"


def test_tools_use_the_tool_template_if_there_is_one():
    tokenizer = byte_level(**{"chat_template": "plain", "chat_template.tool_use": "tools"})
    assert tokenizer.apply_chat_template(HI) == "plain"
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}]) == "tools"


def test_the_names_of_templates_are_no_template_and_another_type_is_refused():
    tokenizer = byte_level(chat_template="plain", chat_templates=["tool_use"])
    assert (tokenizer.chat_template(tools=True), tokenizer.unread_keys) == ("plain", ())
    with pytest.raises(ModelError, match=r"metadata tokenizer\.chat_template is 5, not a text"):
        byte_level(chat_template=5)


def test_the_error_of_a_model_without_template_names_the_fix():
    with pytest.raises(RequestError, match=r"no chat template\. Give a text"):
        byte_level().apply_chat_template(HI)


# --- directories --------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """A model's directory with a small byte-level vocabulary, and truncation and padding left on."""
    backend = byte_level().backend
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}!"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    return tmp_path


def test_a_directory_gives_the_same_tokenizer_as_the_file(directory):
    read, original = Tokenizer.from_directory(directory), byte_level()
    text = "<|im_start|>hello 12\n\n3 🙂<tool>"
    assert read.encode(text) == original.encode(text)
    assert read.decode(read.encode(text)) == original.decode(original.encode(text))
    assert (read.bos_id, read.eos_ids, read.vocab_size) == (0, (1, 7), original.vocab_size)
    assert read.apply_chat_template(HI) == "<|im_end|>!"


def test_texts_are_neither_truncated_nor_padded(directory):
    assert len(Tokenizer.from_directory(directory).encode("a" * 20)) == 20


def test_a_template_file_overrides_the_configuration(directory):
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert Tokenizer.from_directory(directory).apply_chat_template(HI) == "of a processor"
    (directory / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_directory(directory).apply_chat_template(HI) == "from the file"


def test_named_templates_are_read(directory):
    entries = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    tokenizer = Tokenizer.from_directory(directory)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, (7, 1))
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "two"


def test_template_files_take_the_place_of_named_templates(directory):
    entries = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    (directory / "chat_template.jinja").write_text("three")
    assert Tokenizer.from_directory(directory).apply_chat_template(HI, tools=[{}]) == "three"
    (directory / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name}!")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(HI) == "three"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "tool_use!"
    assert tokenizer.apply_chat_template(HI, tools=[{}], chat_template="rag") == "rag!"
    assert tokenizer.chat_template(chat_template="rag") == "rag!"
    with pytest.raises(RequestError, match="is not one of the model's chat templates: 'default', 'rag', 'tool_use'"):
        tokenizer.apply_chat_template(HI, chat_template="{{ messages }}")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="several chat templates and no default: 'rag', 'tool_use'"):
        Tokenizer.from_directory(directory).apply_chat_template(HI)


def test_without_a_generation_config_eos_comes_from_the_model_config_and_the_turn_end(directory):
    (directory / "generation_config.json").unlink()
    assert Tokenizer.from_directory(directory).eos_ids == (1, 9)
    (directory / "tokenizer_config.json").unlink()
    assert Tokenizer.from_directory(directory).eos_ids == (9, 1)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_damaged_file_is_named(directory, name, content):
    (directory / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name}.*etch it again"):
        Tokenizer.from_directory(directory)


def test_a_template_file_that_is_not_text_is_named(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja.*fetch it again"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
def test_a_token_that_is_not_text_is_named(directory, name):
    (directory / "tokenizer_config.json").write_text(json.dumps({name: "\ud800"}))
    with pytest.raises(ModelError, match=rf"tokenizer_config.json: {name} is '\\ud800', not Unicode text"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("value", ["2", 1.5, -1, [1, "2"], [[1]], True, {"id": 1}])
def test_an_end_token_that_is_no_id_is_named(directory, value):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id is .*, not a token id"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "value", [5, [5], [{"name": "default"}], [{"name": ["default"], "template": "x"}], {"default": None}]
)
def test_a_template_of_another_type_is_refused(directory, value):
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is .*, not a text or texts by name"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("value", [None, {}, []])
def test_no_template_is_no_template(directory, value):
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    tokenizer = Tokenizer.from_directory(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(HI)


def test_a_directory_without_a_tokenizer_is_explained(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read.*tokenizer.model alone"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("normalized", [True, False])
def test_added_tokens_with_marked_spaces_decode_to_spaces(tmp_path, normalized):
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("x", "removed")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("▁▁▁", normalized=normalized)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("a    a") == ([1, 2, 0, 1] if normalized else [1, 0, 0, 0, 0, 1])
    assert tokenizer.decode([1, 2, 0, 1]) == "a    a"
