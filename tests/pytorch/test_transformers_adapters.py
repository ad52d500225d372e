"""Adapters and pooling of models of transformers: equal to PEFT, and to the model's own hidden states."""

import json

import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

import numpy as np

from foreword import LLM, PoolingParams, SamplingParams
from foreword.errors import ModelError, RequestError
from models.lora_files import random_factors, write_peft
from models.tiny import write_safetensors
from pytorch.test_transformers import saved

OPTIONS = {"executor": "transformers", "dtype": "fp32", "num_threads": 1, "block_size": 4, "max_num_batched_tokens": 16}
ENDS = {"gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), "olmo2": ("q_proj", "down_proj")}
MODELS = {
    "gpt_neox": (transformers.GPTNeoXConfig, {"num_attention_heads": 2, "intermediate_size": 32}),
    "olmo2": (transformers.Olmo2Config, {"num_attention_heads": 2, "intermediate_size": 32, "num_key_value_heads": 1}),
}
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(3, 200, n).tolist() for n in (21, 5, 13, 9)]


def peft_tokens(folder, adapter, prompt):
    peft = pytest.importorskip("peft", reason="compares with PEFT")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT warns
@pytest.mark.parametrize("name", MODELS)
def test_requests_with_adapters_and_without_get_the_tokens_of_peft(tmp_path, name):
    config, sizes = MODELS[name]
    folder = saved(tmp_path / "model", config, **sizes)
    shapes = {key: x.shape for key, x in transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    adapters = {
        "a": write_peft(tmp_path / "a", random_factors(shapes, ends=ENDS[name]), target_modules=list(ENDS[name])),
        "b": write_peft(tmp_path / "b", random_factors(shapes, 2, seed=2, ends=ENDS[name][:1]), r=2, use_rslora=True),
    }
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    chosen = ["a", None, "b", "a"]
    with LLM(str(folder), **OPTIONS, loras={key: str(path) for key, path in adapters.items()}) as llm:
        found = [
            [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, lora=chosen, progress=False)]
            for _ in range(2)
        ]
        other = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]
    expected = [peft_tokens(folder, adapters.get(key), prompt) for key, prompt in zip(chosen, PROMPTS, strict=True)]
    assert found == [expected] * 2
    assert other != expected
    assert other == [peft_tokens(folder, None, prompt) for prompt in PROMPTS]


def test_adapters_that_cannot_run_are_refused(tmp_path):
    config, sizes = MODELS["gpt_neox"]
    folder = saved(tmp_path / "model", config, **sizes)
    head = {"embed_out": (np.ones((4, 16), np.float32), np.ones((256, 4), np.float32))}
    with LLM(str(folder), **OPTIONS) as llm:
        with pytest.raises(ModelError, match=r"changes embed_out, which is not supported .*query_key_value"):
            llm.load_lora("head", str(write_peft(tmp_path / "head", head)))
        (tmp_path / "a.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelError, match="in PEFT's format"):
            llm.load_lora("gguf", str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_embeddings_are_the_models_hidden_states(tmp_path, pooling):
    config, sizes = MODELS["olmo2"]
    folder = saved(tmp_path, config, **sizes)
    of_modules = {"last": "lasttoken", "mean": "mean", "cls": "cls"}[pooling]
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for _, path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": of_modules}))
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS]
    pooled = [{"last": x[-1], "mean": x.mean(0), "cls": x[0]}[pooling] for x in states]
    with LLM(str(folder), **OPTIONS) as llm:
        for _ in range(2):
            found = [output.data for output in llm.embed(PROMPTS, PoolingParams(normalize=False), progress=False)]
            np.testing.assert_allclose(found, pooled, atol=1e-5)
        assert len(llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3), progress=False)[0].outputs[0].token_ids)


def test_a_model_without_weights_of_logits_only_embeds(tmp_path):
    config, sizes = MODELS["olmo2"]
    folder = saved(tmp_path, config, **sizes)
    model = transformers.AutoModel.from_pretrained(folder)
    model.save_pretrained(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        assert np.isfinite(llm.embed(PROMPTS[:1], progress=False)[0].data).all()
        with pytest.raises(RequestError, match="computes no logits"):
            llm.generate(PROMPTS[:1])
    weights = {name: x.numpy() for name, x in model.state_dict().items() if "layers.0.mlp" not in name}
    write_safetensors(folder / "model.safetensors", weights)
    with pytest.raises(ModelError, match=r"its files lack 3 weights, model\.layers\.0\.mlp"):
        LLM(str(folder), **OPTIONS)
