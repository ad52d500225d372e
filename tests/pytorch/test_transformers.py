"""Models of transformers as an executor: equal to Foreword's own executors, or refused with the reason."""

import gc
import json
import re
import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

import numpy as np

from foreword import LLM, PoolingParams, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, ModelError, UnsupportedModelError
from foreword.executors.kinds import TRANSFORMERS
from foreword.executors.transformers import trace as tracing
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.interface import attention_of
from foreword.executors.transformers.model import load_transformers, max_model_len
from foreword.executors.transformers.trace import Mask, kind_of
from foreword.executors.transformers.verify import inputs_of
from foreword.installation import install
from models.recorded import make
from models.tiny import write_model

NAMES = ("llama3", "qwen2-sliding", "gemma2", "gemma3", "qwen3-moe")
OPTIONS = {"dtype": "fp32", "num_threads": 1}


def answers(folder, executor, **options):
    """Tokens and log-probabilities of requests that share prefixes, in chunks, with preemptions."""
    options = {"max_model_len": 48, "block_size": 4, "max_num_batched_tokens": 16, "check": "full"} | options
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, n).tolist() for n in (3, 18, 25, 9)]
    prompts.append([*prompts[2][:16], 5, 6])
    greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    params = [SamplingParams(**greedy) for _ in prompts]
    params[0] = SamplingParams(**greedy, prompt_logprobs=1)
    params[3] = SamplingParams(**greedy | {"temperature": 1.0}, seed=3)
    with LLM(str(folder), executor=executor, **options) as llm:
        found = []
        for wave in (slice(0, 4), slice(4, 5)):
            found += llm.generate(prompts[wave], params[wave], progress=False)
        assert found[4].metrics.num_cached_tokens > 0 or "num_blocks" in options
    tokens = [output.outputs[0].token_ids for output in found]
    logprobs = [
        [entry[token].logprob for token, entry in zip(ids, output.outputs[0].logprobs, strict=True)]
        for ids, output in zip(tokens, found, strict=True)
    ]
    of_prompt = [
        entry[token].logprob for token, entry in zip(prompts[0][1:], found[0].prompt_logprobs[1:], strict=True)
    ]
    return tokens, [*logprobs, of_prompt]


@pytest.mark.parametrize("name", NAMES)
def test_requests_get_the_tokens_of_the_reference_executor(tmp_path, name):
    folder = make(tmp_path, name)
    tokens, logprobs = answers(folder, "numpy")
    for options in ({}, {"async_scheduling": True, "num_blocks": 64}):
        found, of_found = answers(folder, "transformers", **OPTIONS, **options)
        assert found == tokens
        for one, other in zip(of_found, logprobs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_near_the_reference_executor(tmp_path, dtype):
    folder = make(tmp_path, "gemma2")
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    prompt = list(range(3, 30))
    rows = []
    for executor, options in (("numpy", {}), ("transformers", {"dtype": dtype, "num_threads": 1})):
        with LLM(str(folder), executor=executor, max_num_batched_tokens=8, **options) as llm:
            [output] = llm.generate([prompt], params, progress=False)
            entries = output.outputs[0].logprobs[0]
            rows.append([entries[i].logprob for i in range(48)])
    np.testing.assert_allclose(rows[1], rows[0], atol=0.3)


def test_grammars_and_drafts_change_nothing_that_they_must_not(tmp_path):
    folder = make(tmp_path, "llama3")
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=6, structured_outputs={"choice": ["\x00\x01", "\x02\x03"]}),
    ]

    def tokens(executor, **options):
        with LLM(str(folder), executor=executor, max_model_len=48, **options) as llm:
            outputs = llm.generate([prompt, prompt], params, progress=False)
            return [output.outputs[0].token_ids for output in outputs]

    expected = tokens("numpy")
    assert tokens("transformers", **OPTIONS) == expected
    assert tokens("transformers", speculation=SpeculationConfig(num_tokens=3), **OPTIONS) == expected


def test_an_unknown_architecture_runs_on_transformers_by_itself(tmp_path, monkeypatch):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    folder = saved(tmp_path, transformers.DiffLlamaConfig, **sizes)
    with LLM(str(folder), max_model_len=32, dtype="fp32") as llm:
        assert isinstance(llm.engine.executor, TransformersExecutor)
        [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=5), progress=False)
        assert len(output.outputs[0].token_ids) == 5
    with pytest.raises(UnsupportedModelError, match="diffllama"):
        LLM(str(folder), executor="numpy")
    with pytest.raises(ConfigError, match="weight_format"):
        LLM(str(folder), weight_format="q4")
    monkeypatch.setattr(type(TRANSFORMERS), "packages", ("no_such_package",))
    how = re.escape(install(TRANSFORMERS.extra))
    with pytest.raises(ModelError, match=how):
        LLM(str(folder))
    with pytest.raises(ConfigError, match=how):
        LLM(str(folder), executor="transformers")


@pytest.mark.parametrize(
    ("config", "reason"), [("LongT5Config", "no causal language model"), ("ProphetNetConfig", "encoder–decoder")]
)
def test_what_is_no_causal_model_is_refused_with_the_reason(tmp_path, config, reason):
    getattr(transformers, config)().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        load_transformers(tmp_path, "model")


FALCON = {"num_attention_heads": 4, "ffn_hidden_size": 32}
CONNECTED = {
    "bloom": (transformers.BloomConfig, {"n_head": 3, "hidden_size": 24, "seq_length": 64}),
    "codegen": (transformers.CodeGenConfig, {"n_head": 4, "rotary_dim": 4}),
    "falcon-7b": (transformers.FalconConfig, FALCON | {"multi_query": True}),
    "falcon-40b": (transformers.FalconConfig, FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-heads": (transformers.FalconConfig, FALCON | {"multi_query": False}),
    "gpt_neo": (
        transformers.GPTNeoConfig,
        {"num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6, "intermediate_size": 32},
    ),
    "gptj": (transformers.GPTJConfig, {"n_head": 4, "rotary_dim": 2}),
    "mpt": (transformers.MptConfig, {"d_model": 24, "n_heads": 3, "max_seq_len": 64}),
}


@pytest.mark.parametrize("name", CONNECTED)
def test_layers_that_attend_by_code_of_their_own_are_connected(tmp_path, name):
    config, sizes = CONNECTED[name]
    folder = saved(tmp_path, config, **sizes)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 200, n).tolist() for n in (21, 5, 13)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = OPTIONS | {"block_size": 4, "max_num_batched_tokens": 16, "check": "full"}
    with LLM(str(folder), executor="transformers", **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, progress=False)]
        [embedding] = llm.embed(prompts[:1], PoolingParams(normalize=False), progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, found, strict=True):
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            assert tokens == logits.argmax(-1).tolist()
        states = model.base_model(torch.tensor(prompts[:1])).last_hidden_state[0, -1]
    np.testing.assert_allclose(embedding.data, states, atol=1e-5)


def test_a_model_that_attends_otherwise_than_traced_is_refused(tmp_path):
    model = load_transformers(make(tmp_path, "mistral"), "mistral", **OPTIONS)
    assert inputs_of(model.module, model.trace) == (0, 32, 0, 0)
    calls = [replace(call, attention=replace(call.attention, window=None)) for call in model.trace.calls]
    unmasked = replace(model.trace, calls=tuple(calls))
    with pytest.raises(ModelError, match="differ from those of its own forward pass"):
        inputs_of(model.module, unmasked)


def test_a_mask_of_the_models_own_is_not_paged(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "_evaluated", lambda *_: torch.ones(5, 5, dtype=torch.bool).tril())
    before = tracing._Recorder.attend

    def with_other_mask(self, module, query, key, value, attention_mask, **arguments):
        return before(self, module, query, key, value, attention_mask.clone(), **arguments)

    monkeypatch.setattr(tracing._Recorder, "attend", with_other_mask)
    model = load_transformers(make(tmp_path, "llama3"), "llama", **OPTIONS)
    assert "builds its own attention masks" in model.trace.why_not_paged


@pytest.mark.parametrize(
    ("mask", "function"),
    [
        (Mask(), lambda b, h, q, k: k <= q),
        (Mask(window=1), lambda b, h, q, k: k == q),
        (Mask(window=7), lambda b, h, q, k: (k <= q) & (k > q - 7)),
        (Mask(chunk=16), lambda b, h, q, k: (k <= q) & (k // 16 == q // 16)),
        (None, lambda b, h, q, k: k <= q + 1),
        (None, lambda b, h, q, k: (k <= q) & (k % 2 == 0)),
        (None, lambda b, h, q, k: torch.zeros(3, dtype=torch.bool)[q] & (k <= q)),
    ],
)
@pytest.mark.parametrize("length", [31, 32, 50])
def test_kinds_of_masks(mask, function, length):
    if mask is not None:
        assert kind_of(function, length) == mask
    else:
        with pytest.raises(ModelError, match="mask"):
            kind_of(function, length)


def test_a_freed_executor_is_forgotten_by_transformers(tmp_path):
    llm = LLM(str(make(tmp_path, "llama3")), executor="transformers", **OPTIONS)
    interface = transformers.AttentionInterface()
    assert [name for name in interface if name.startswith("foreword")]
    executor = weakref.ref(llm.engine.executor)
    llm.close()
    del llm
    gc.collect()
    assert executor() is None
    assert not [name for name in interface if name.startswith("foreword")]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 64),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "long_factor": [2.0] * 4,
                "short_factor": [1.0] * 4,
                "original_max_position_embeddings": 16,
            },
            16,
        ),
    ],
)
def test_frequencies_that_depend_on_the_step_bound_the_length(rope, length):
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope
    )
    assert max_model_len(config) == length


def test_positions_that_begin_after_the_padding_shorten_the_context(tmp_path):
    folder = saved(tmp_path, transformers.RobertaConfig, num_attention_heads=2, intermediate_size=32, is_decoder=True)
    with LLM(str(folder), executor="transformers", **OPTIONS) as llm:
        model = llm.model.loaded
        assert model.max_model_len == 64 - model.inputs.first_position < 64
        prompt = [5 + i for i in range(model.max_model_len - 4)]
        [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4, logprobs=0), progress=False)
        tokens = output.outputs[0].token_ids
        with torch.inference_mode(), attention_of(model.module, "eager"):
            expected = model.module(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, -len(tokens) :].argmax(-1)
        assert tokens == expected.tolist()


def test_a_slow_tokenizer_is_converted(tmp_path):
    folder = saved(tmp_path, transformers.GPTNeoXConfig, num_attention_heads=2, intermediate_size=32)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"})
    )
    model = load_transformers(folder, "model", **OPTIONS)
    assert model.tokenizer.encode("abba") == [2, 1, 0]
    assert 3 in model.eos_token_ids


@pytest.mark.parametrize(("name", "value"), [("dtype", "int8"), ("device", "tpu"), ("num_threads", 0)])
def test_an_unknown_option_value_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=name):
        load_transformers(make(tmp_path, "llama3"), "llama", **{name: value})


def test_compile_needs_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"compile=True: .*'no-such-compiler'"):
        load_transformers(make(tmp_path, "llama3"), "llama", compile=True)


def test_a_damaged_model_is_an_error(tmp_path):
    folder = make(tmp_path, "llama3")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelError, match="cannot load it"):
        load_transformers(folder, "llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError):
        load_transformers(folder, "llama")


def saved(folder, config, **sizes):
    """A tiny random model, saved by transformers, with a tokenizer of one token per byte."""
    common = {"vocab_size": 256, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 0}
    if not {"d_model", "hidden_size"} & sizes.keys():
        common["hidden_size"] = 16
    if not {"seq_length", "max_seq_len"} & sizes.keys():
        common["max_position_embeddings"] = 64
    config = config(**common, **sizes)
    torch.manual_seed(0)
    write_model(folder, config.to_dict(), {})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # such that every token depends on all that it attends to
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    model.save_pretrained(folder)
    return folder
