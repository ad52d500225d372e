"""Models of transformers that keep states or attend by code of their own: the tokens of `generate` in any traffic."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

import numpy as np

from foreword import LLM, SamplingParams
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import ConfigError, ModelError, RequestError
from foreword.executors.transformers.model import ANY_LENGTH, load_transformers
from foreword.executors.transformers.own_cache import OwnCacheExecutor
from models.tiny import write_model

OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1}
COMMON = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
SIZES = COMMON | {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MODELS = {
    "BambaConfig": SIZES | MAMBA | {"attn_layer_indices": [1]},
    "FalconH1Config": SIZES | MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "FalconConfig": COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "JambaConfig": SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "Lfm2Config": SIZES | {"layer_types": ["conv", "full_attention", "conv"]},
    "Mamba2Config": COMMON
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "MambaConfig": COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "OpenAIGPTConfig": {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Qwen3_5TextConfig": SIZES | LINEAR | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "RecurrentGemmaConfig": SIZES | {"lru_width": 32, "attention_window_size": 8},
    "RwkvConfig": COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 128},
    "XLMConfig": {"vocab_size": 256, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
}


def saved(folder, name):
    """A random model of a configuration, of four layers if its layers have types, with a token per byte."""
    sizes = dict(MODELS[name])
    if "layer_types" in sizes:
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(0)
    write_model(folder, config.to_dict(), {})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():  # such that every token depends on all before it
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def generated(folder, prompts, max_tokens):
    """The tokens of the library's own greedy search, one prompt at a time, in float32."""
    found = []
    for prompt in prompts:  # each with a new model: that of RecurrentGemma keeps states of the prompt before
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        model.generation_config = transformers.GenerationConfig(max_new_tokens=max_tokens, pad_token_id=0)
        with torch.inference_mode():
            found.append(model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist())
    return found


def prompts_of(lengths) -> Iterator[list[int]]:
    rng = np.random.default_rng(0)
    return (rng.integers(3, 256, length).tolist() for length in lengths)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "XLMConfig"])
def test_requests_get_the_tokens_of_generate(tmp_path, name):
    """In chunks and mixed steps, with fewer caches than requests, and after hits in copied caches."""
    folder = saved(tmp_path, name)
    prompts = list(prompts_of((21, 5, 1, 33, 12)))
    prompts += [[*prompts[0][:16], 5, 6], prompts[3]]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    options = {"block_size": 4, "max_num_batched_tokens": 16, "num_blocks": 6, "max_num_seqs": 3, "check": "full"}
    with LLM(folder, max_model_len=64, **OPTIONS, **options) as llm:
        assert isinstance(llm.engine.executor, OwnCacheExecutor)
        found = llm.generate(prompts[:5], params, progress=False) + llm.generate(prompts[5:], params, progress=False)
        assert found[5].metrics.num_cached_tokens or found[6].metrics.num_cached_tokens
    assert [output.outputs[0].token_ids for output in found] == generated(folder, prompts, 8)


def test_single_tokens_are_computed_together_where_caches_have_one_size(tmp_path):
    prompts, rows = list(prompts_of((9, 6, 3, 8))), []
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(saved(tmp_path, "MambaConfig"), max_model_len=64, max_num_batched_tokens=64, **OPTIONS) as llm:
        model = llm.engine.executor.model
        model.register_forward_pre_hook(
            lambda _, args, given: rows.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )
        llm.generate(prompts, params, progress=False)
    assert rows == [(1, 9), (1, 6), (1, 3), (1, 8), *[(4, 1)] * 4]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "chunks", "batches"), [("Mamba2Config", True, True), ("MambaConfig", False, True)])
def test_chunks_that_lose_the_state_are_known_in_numbers_of_few_bits_too(tmp_path, name, chunks, batches, dtype):
    """transformers continues the state of Mamba by single tokens alone, and that of Mamba 2 by several."""
    trace = load_transformers(Path(saved(tmp_path, name)), name, dtype=dtype, num_threads=1).trace
    assert (trace.takes_chunks, trace.takes_batches) == (chunks, batches)


@pytest.mark.parametrize("name", ["BambaConfig", "MambaConfig", "OpenAIGPTConfig"])
def test_a_failed_step_changes_no_token(tmp_path, name):
    """The third step fails when the model has changed a cache, and is run again."""
    folder = saved(tmp_path, name)
    prompts = list(prompts_of((9, 6)))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(folder, max_model_len=64, **OPTIONS) as llm:
        engine, found, model = llm.engine, {}, llm.engine.executor.model
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        for step in range(20):
            if step == 2:

                def fail(*_: object) -> None:
                    raise RuntimeError("of a device")

                handle = model.register_forward_hook(fail)
                with pytest.raises(RuntimeError, match="of a device"):
                    engine.step()
                handle.remove()
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert [found["0"], found["1"]] == generated(folder, prompts, 5)


@pytest.mark.parametrize("caches", [True, False])
def test_a_preempted_request_is_computed_again(tmp_path, caches):
    """No request needs a further block, so the test preempts: in the middle of a prompt, and of the outputs."""
    folder = saved(tmp_path, "BambaConfig")
    prompts, found = list(prompts_of((9, 5, 21))), {}
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    options = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16, "prefix_caching": caches}
    with LLM(folder, **OPTIONS, **options) as llm:
        engine = llm.engine
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        for step in range(20):
            if step in (1, 5):
                engine.scheduler._preempt_last()
            found |= {output.request_id: output for output in engine.step() if output.finished}
    assert found["2"].metrics.num_preemptions == 2
    assert [found[str(i)].outputs[0].token_ids for i in range(3)] == generated(folder, prompts, 9)


def test_several_samples_continue_copies_of_one_cache(tmp_path):
    folder = saved(tmp_path, "BambaConfig")
    [prompt] = prompts_of((22,))
    together = SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=1)
    options = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16}
    with LLM(folder, **OPTIONS, **options) as llm, LLM(folder, prefix_caching=False, **OPTIONS, **options) as alone:
        [one], [other] = (each.generate([prompt], together, progress=False) for each in (llm, alone))
    assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in other.outputs]


def test_a_cache_has_the_bytes_that_the_pool_counts(tmp_path):
    """Bamba's: in each attention layer keys and values, in each Mamba layer a state and the inputs of a convolution."""
    folder = saved(tmp_path, "BambaConfig")
    keys = 4 * 2 * 2 * 8  # bytes per token: float32, keys and values, 2 heads of 8
    states = 2 * 4 * (8 * 8 * 8 + (64 + 2 * 2 * 8) * 4)  # 2 layers: 8 heads of 8 × 8, 96 channels of 4 inputs
    with LLM(folder, max_model_len=40, kv_cache_bytes=3 * (40 * keys + states), **OPTIONS) as llm:
        assert llm.model.loaded.trace.cache_bytes(40) == 40 * keys + states
        assert llm.engine.executor.num_blocks == 3
    with pytest.raises(ConfigError, match=f"needs {2 * (40 * keys + states)}; give that many, or lower max_model_len"):
        LLM(folder, max_model_len=40, kv_cache_bytes=2 * (40 * keys + states) - 1, **OPTIONS)


def test_a_model_without_a_longest_position_has_a_bound(tmp_path):
    assert load_transformers(Path(saved(tmp_path, "Mamba2Config")), "mamba").max_model_len == ANY_LENGTH


def test_what_a_cache_of_its_own_cannot_do_is_refused_by_name(tmp_path):
    folder = saved(tmp_path / "bamba", "BambaConfig")
    with pytest.raises(ModelError, match=r"recurrent states.*is not compiled"):
        LLM(folder, compile=True, **OPTIONS)
    with pytest.raises(ConfigError, match="recurrent"):
        LLM(folder, max_model_len=64, speculation=SpeculationConfig(num_tokens=2), **OPTIONS)
    with pytest.raises(ConfigError, match="executor 'transformers' runs no head for further tokens"):
        LLM(folder, max_model_len=64, speculation="head", **OPTIONS)
    with pytest.raises(ConfigError, match="host_cache_bytes"):
        LLM(folder, max_model_len=64, host_cache_bytes=1 << 20, **OPTIONS)
    with LLM(folder, max_model_len=64, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="pooling"):
            llm.embed([[5, 6]], progress=False)
        with pytest.raises(RequestError, match="cache of the model's own"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
        with pytest.raises(ConfigError, match="runs no LoRA adapters"):
            llm.load_lora("adapter", tmp_path)
    with pytest.raises(ModelError, match="attention interface; with a cache of its own: its tokens see later ones"):
        LLM(saved(tmp_path / "xlm", "XLMConfig"), **OPTIONS)
