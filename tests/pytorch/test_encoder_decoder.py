"""Encoder–decoders of transformers: the tokens of transformers' own generate, alone and among others."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

import json
import re
from types import MappingProxyType

import numpy as np

from foreword import LLM, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, ModelError, RequestError
from foreword.executors.transformers.encoder_decoder import cross_bytes
from models.tiny import write_model

OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
BART = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "init_std": 0.8,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 32, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "n_positions": 64, "initializer_factor": 3.0,
}  # fmt: skip
WHISPER = BART | {
    "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64, "begin_suppress_tokens": None,
}  # fmt: skip
CASES = {
    "bart": ("BartConfig", BART),
    "mbart": ("MBartConfig", BART),
    "pegasus": ("PegasusConfig", BART),
    "marian": ("MarianConfig", BART),
    "blenderbot": ("BlenderbotConfig", BART),
    "blenderbot-small": ("BlenderbotSmallConfig", BART),
    "plbart": ("PLBartConfig", BART),
    "t5": ("T5Config", T5),
    "t5-gated": ("T5Config", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", T5),
    "whisper": ("WhisperConfig", WHISPER),
}


@pytest.mark.parametrize("name", CASES)
def test_requests_get_the_tokens_of_transformers_generate(tmp_path, name):
    folder = saved(tmp_path, *CASES[name])
    prompts = prompts_of(name)
    params = SamplingParams(**GREEDY)
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=8, block_size=4, check="full", **OPTIONS) as llm:
        expected = [own_tokens(llm.model, prompt) for prompt in prompts]
        assert len({tuple(tokens) for tokens in expected}) > 1
        assert [tokens_of(one) for one in llm.generate(prompts, params, progress=False)] == expected
        [alone] = llm.generate(prompts[2], params, progress=False)
        assert tokens_of(alone) == expected[2]
        own = llm.model.encoder.max_len
    with LLM(str(folder), num_blocks=13, max_model_len=32, block_size=4, max_num_batched_tokens=16, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        assert [tokens_of(one) for one in outputs] == expected
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert llm.model.encoder.max_len == own


def test_tokens_that_the_generation_config_suppresses_are_not_written(tmp_path):
    folder, prompts, params = saved(tmp_path, *CASES["bart"]), prompts_of("bart"), SamplingParams(**GREEDY)
    with LLM(str(folder), **OPTIONS) as llm:
        free = [tokens_of(one) for one in llm.generate(prompts, params, progress=False)]
    rules = {
        "suppress_tokens": [tokens[3] for tokens in free],
        "begin_suppress_tokens": [tokens[0] for tokens in free],
        "bad_words_ids": [[tokens[-1]] for tokens in free],
    }
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **rules}))
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=8, block_size=4, **OPTIONS) as llm:
        found = [tokens_of(one) for one in llm.generate(prompts, params, progress=False)]
        assert found == [own_tokens(llm.model, prompt) for prompt in prompts] != free
        speculative = {"speculation": SpeculationConfig(num_tokens=3)}
    with LLM(str(folder), block_size=4, **speculative, **OPTIONS) as llm:
        assert [tokens_of(one) for one in llm.generate(prompts, params, progress=False)] == found


def test_the_encoder_runs_once_for_equal_inputs(tmp_path, monkeypatch):
    folder = saved(tmp_path, *CASES["bart"])
    runs = []
    with LLM(str(folder), max_num_seqs=2, **OPTIONS) as llm:
        encoder = llm.model.loaded.module.get_encoder()
        forward = encoder.forward
        monkeypatch.setattr(encoder, "forward", lambda *a, **named: runs.append(1) or forward(*a, **named))
        params = SamplingParams(**GREEDY)
        llm.generate([[7, 8, 9]] * 3, params, progress=False)
        assert len(runs) == 1
        llm.generate([[5], [6, 5], [7, 8, 9]], params, progress=False)
        assert len(runs) >= 3


def test_an_encoder_that_fails_ends_its_request_alone(tmp_path, monkeypatch):
    prompts, params = prompts_of("bart"), SamplingParams(**GREEDY)
    with LLM(str(saved(tmp_path, *CASES["bart"])), max_num_seqs=2, block_size=4, **OPTIONS) as llm:
        expected = [tokens_of(one) for one in llm.generate(prompts, params, progress=False)]
        encoder = llm.model.loaded.module.get_encoder()
        forward = encoder.layers[1].forward

        def fails_at_nine(hidden, *arguments, **named):
            if hidden.shape[1] == 9:
                raise RuntimeError("no memory\nfor it")
            return forward(hidden, *arguments, **named)

        monkeypatch.setattr(encoder.layers[1], "forward", fails_at_nine)
        bad = {"encoder_token_ids": [7] * 9}
        for _ in range(3):  # more often than there are places
            outputs = llm.generate([*prompts[:3], bad, *prompts[3:], bad], params, progress=False)
            failed = outputs.pop(7), outputs.pop(3)
            assert [tokens_of(one) for one in outputs] == expected
            for one in failed:
                assert one.outputs[0].finish_reason == "error"
                assert re.search(
                    r"encoder_input = 'int32 \[9\]': the encoder failed \(RuntimeError: no memory\)", str(one.error)
                )
        with pytest.raises(RequestError, match="the encoder failed"):
            llm.generate(bad, params, progress=False)
        assert llm.engine.cache.pool.num_used == 0


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_inputs_of_many_lengths_get_the_tokens_that_each_gets_alone(tmp_path, name):
    """More inputs than places, chunks of prompts, preempted requests, outputs of different lengths."""
    noise = np.random.default_rng(2)
    start = CASES[name][1]["decoder_start_token_id"]
    prompts, params = [], []
    for i in range(24):
        given = (
            {"audio": noise.standard_normal(int(noise.integers(200, 16000))).astype(np.float32)}
            if name == "whisper"
            else {"encoder_token_ids": noise.integers(3, 250, int(noise.integers(1, 65))).tolist()}
        )
        before = noise.integers(3, 250, int(noise.integers(0, 12))).tolist()
        prompts.append({**given, "prompt_token_ids": [start, *before]})
        params.append(SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=3 + i % 9, ignore_eos=True))
    folder = saved(tmp_path, *CASES[name])
    with LLM(str(folder), max_num_seqs=1, prefix_caching=False, **OPTIONS) as llm:
        alone = [tokens_of(llm.generate(*one, progress=False)[0]) for one in zip(prompts, params, strict=True)]
        one_place = cross_bytes(llm.model.loaded.trace, llm.model.encoder.max_len, torch.float32)
    budget = {"max_num_seqs": 8, "num_blocks": 12, "block_size": 4, "max_model_len": 32}
    with LLM(
        str(folder), kv_cache_bytes=2 * 5 * one_place, max_num_batched_tokens=8, check="full", **budget, **OPTIONS
    ) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        assert llm.engine.states.max_num_reqs == 5  # places of encoder outputs, of the budget
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert [tokens_of(one) for one in outputs] == alone


class Unreadable(dict):
    def keys(self):
        raise OSError("gone")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt_token_ids": [2]}, "encoder_token_ids"),
        ({"encoder_token_ids": []}, "encoder_token_ids"),
        ({"encoder_token_ids": None}, "encoder_token_ids"),
        ({"encoder_token_ids": "text"}, "encoder_token_ids"),
        ({"encoder_token_ids": [[5]]}, "encoder_token_ids"),
        ({"encoder_token_ids": [-1]}, "encoder_token_ids"),
        ({"encoder_token_ids": [2**40]}, "encoder_token_ids"),
        ({"encoder_token_ids": np.array([0.5])}, "encoder_token_ids"),
        ([300], "encoder_token_ids"),
        ([5] * 65, "encoder_token_ids"),
        ({"audio": [0.0]}, "audio"),
        ({"encoder_token_ids": [5], "audio": [0.0]}, "audio"),
        ({"encoder_token_ids": [5], "image": 1}, "prompt"),
        ({"encoder_token_ids": [5], "prompt_embeds": np.zeros((2, 16), np.float32)}, "prompt"),
        ({"encoder_token_ids": [5], "mrope_delta": 1}, "prompt"),
        ({"encoder_token_ids": [5], "language": "en"}, "language"),
        ({"encoder_token_ids": [5], "prompt_token_ids": []}, "prompt_token_ids"),
        ({"encoder_token_ids": [5], "prompt_token_ids": [256]}, "prompt_token_ids[0]"),
        ({"encoder_token_ids": [5], "prompt_token_ids": [5] * 64}, "prompt_token_ids"),
        (MappingProxyType(Unreadable()), "prompt"),
    ],
)
def test_what_the_model_cannot_read_is_refused_by_name(bart, prompt, field):
    with pytest.raises(RequestError) as found:
        bart.generate([prompt] if isinstance(prompt, MappingProxyType) else prompt, progress=False)
    assert found.value.field == field


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.generate([5], lora="law"), "lora"),
        (lambda llm: llm.embed([5]), "pooling_params"),
        (lambda llm: llm.generate([5], SamplingParams(truncate_prompt_tokens=1)), "truncate_prompt_tokens"),
        (lambda llm: llm.transcribe(np.zeros(5)), "audio"),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0]"),
    ],
)
def test_what_encoder_decoders_do_not_do_is_refused_by_name(bart, call, field):
    with pytest.raises(RequestError) as found:
        call(bart)
    assert found.value.field == field


def test_settings_of_the_engine_that_encoder_decoders_do_not_have_are_refused(tmp_path, bart):
    with pytest.raises(ConfigError, match="runs no LoRA adapters"):
        bart.load_lora("law", tmp_path)
    folder = str(saved(tmp_path, *CASES["bart"]))
    with pytest.raises(ModelError, match="not compiled"):
        LLM(folder, compile=True, **OPTIONS)
    with pytest.raises(ConfigError, match="encoder's keys and values of a request need 16384"):
        LLM(folder, kv_cache_bytes=1000, **OPTIONS)


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    with LLM(str(saved(tmp_path_factory.mktemp("bart"), *CASES["bart"])), **OPTIONS) as llm:
        yield llm


def prompts_of(name):
    """Six prompts: equal encoder inputs with other decoder prompts, equal decoder prompts with other inputs."""
    noise = np.random.default_rng(1)
    if name == "whisper":
        sounds = [noise.standard_normal(n).astype(np.float32) for n in (8000, 300, 16000)]
        given = [{"audio": sound} for sound in sounds]
    else:
        given = [{"encoder_token_ids": noise.integers(3, 250, n).tolist()} for n in (5, 17, 33)]
    long = [CASES[name][1]["decoder_start_token_id"], *noise.integers(3, 250, 14).tolist()]
    return [*given, *({**one, "prompt_token_ids": long} for one in given)]


def own_tokens(model, prompt):
    """The tokens of transformers' generate for one request alone."""
    reader, module = model.encoder, model.loaded.module
    start = prompt.get("prompt_token_ids", reader.first_tokens)
    with torch.inference_mode():
        if "audio" in prompt:
            given = {"input_features": torch.tensor(reader.speech.features(prompt["audio"]))[None]}
        else:
            given = {"input_ids": torch.tensor([prompt["encoder_token_ids"]])}
        before = module.config._attn_implementation
        module.set_attn_implementation("eager")
        try:
            out = transformers.GenerationMixin.generate(
                module, **given, decoder_input_ids=torch.tensor([start]), do_sample=False, num_beams=1,
                eos_token_id=None, max_new_tokens=GREEDY["max_tokens"],
            )  # fmt: skip
        finally:
            module.set_attn_implementation(before)
    return out[0, len(start) :].tolist()


def tokens_of(output):
    return list(output.outputs[0].token_ids)


def saved(folder, config, sizes):
    """A tiny random model, saved by transformers, with a tokenizer of one token per byte."""
    config = getattr(transformers, config)(vocab_size=256, **sizes)
    torch.manual_seed(0)
    write_model(folder, config.to_dict(), {})
    if config.model_type == "whisper":
        kind = transformers.WhisperForConditionalGeneration
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    else:
        kind = transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config) if kind is transformers.AutoModelForSeq2SeqLM else kind(config)
    model.save_pretrained(folder)
    return folder
