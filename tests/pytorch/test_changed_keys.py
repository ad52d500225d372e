"""Every key of a configuration, changed alone: the logits are those of transformers, or the key is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foreword import LLM, SamplingParams
from foreword.errors import ModelError
from foreword.models.families import FAMILIES
from foreword.models.keys import WITHOUT_EFFECT
from foreword.models.loader import load_model
from models.recorded import TINY
from models.running import EXECUTORS, FLOATS, all_logits, in_chunks, whole
from models.test_model_keys import REFERENCE
from models.tiny import write_model

NAMES = {tiny["config"]["model_type"]: name for name, tiny in reversed(TINY.items())}
"""A tiny model of each family."""
UNSTABLE = [("hidden_size_per_layer_input", 1)]
"""Values with which rounding decides: a norm over one number is its sign."""
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "mish", "relu2", "quick_gelu")
ROTARY = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)  # fmt: skip
MORE = {"partial_rotary_factor": [0.5], "is_causal": [False], "attention_bias": [True], "mlp_bias": [True],
        "norm_topk_prob": [True, False], "attn_logit_softcapping": [2.0], "final_logit_softcapping": [1.5],
        "query_pre_attn_scalar": [3], "head_dim": [16, None], "logit_scale": [2.0],
        "tie_word_embeddings": [True, False], "rope_theta": [77.0], "sliding_window": [3],
        "use_sliding_window": [True], "scale_depth": [None], "dim_model_base": [None]}  # fmt: skip
WINDOWS = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 2}
OTHERS = {"vocab_size", "architectures", "model_type", *WITHOUT_EFFECT}
TEXT = np.random.default_rng(3).integers(3, 40, 14).tolist()


def other_values(key, value):
    """Values of the same kind, and for null of several kinds."""
    match value:
        case bool():
            return [not value, None]
        case int():
            return [value + 1, 2 * value, max(1, value // 2)]
        case float():
            return [2 * value, value / 2]
        case None:
            return [True, 2]
        case [_, *_]:
            return [value[::-1]]
    return ACTIVATIONS if "activation" in key or key == "hidden_act" else []


def changes(config):
    """Configurations that differ in one key, and with windows and other rotary parameters in both forms."""
    known = {**REFERENCE["families"][config["model_type"]]["defaults"], **config}
    for key, value in known.items():
        for other in [*other_values(key, value), *MORE.get(key, ())]:
            if key not in OTHERS and other != value and (key, other) not in UNSTABLE:
                yield {**config, key: other}
    for key in MORE.keys() - known.keys():
        yield from ({**config, key: value} for value in MORE[key])
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.get("num_hidden_layers", 4))]
    for windows in ({"layer_types": None}, {"layer_types": types}):
        yield {**config, **WINDOWS, **windows}
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    # OLMo 3 in transformers reads an older rope_theta for its full layers alone.
    theta = 500_000.0 if config["model_type"] == "olmo3" else 500.0
    for parameters in ROTARY:
        yield {**config, "rope_parameters": {"rope_theta": 500.0, **parameters}}
        yield {**older, "rope_theta": theta, "rope_scaling": parameters}
        yield {**config, "rope_scaling": parameters}


def of_transformers(folder):
    """A model of random weights for the config.json of the folder, where it is saved; None if it cannot be made."""
    try:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
                parameter.add_(scale * torch.randn(parameter.shape))
            written = (folder / "config.json").read_text()
            model.save_pretrained(folder)
            (folder / "config.json").write_text(written)
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            # Its caches need a layer with attention.
            return model.eval()(torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    except Exception:  # a value that it does not take raises errors of any type
        return None


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])
def test_each_key_changed_alone_is_computed_as_by_transformers_or_refused(tmp_path, model_type):
    tiny, counts = TINY[NAMES[model_type]], {"equal": 0, "refused": 0, "unknown": 0}
    for i, config in enumerate(changes(tiny["config"])):
        folder = write_model(tmp_path / str(i), config, {})
        want = of_transformers(folder)
        if want is None:
            counts["unknown"] += 1
            continue
        try:
            model = load_model(folder)
        except ModelError:
            counts["refused"] += 1
            continue
        if not model.spec.is_causal:  # it has no logits
            counts["refused"] += 1
            continue
        model = replace(model, spec=model.spec.for_length(len(TEXT)))
        [got] = all_logits(model, [TEXT], whole([TEXT]))
        difference = np.abs(got - want).max() / max(1, np.abs(want).max())
        changed = {
            key: config.get(key) for key in {*config, *tiny["config"]} if config.get(key) != tiny["config"].get(key)
        }
        assert difference < 2e-3, f"{json.dumps(changed)}: {difference}"
        counts["equal"] += 1
    assert counts["equal"] > 20
    assert counts["refused"] > 2


TYPES = "layer_types"
ONE_KIND = {
    "bamba": [{"attn_layer_indices": []}, {"attn_layer_indices": [0, 1, 2, 3]}],
    "nemotron-h": [{"layers_block_type": [kind, "mlp", kind]} for kind in ("linear_attention", "full_attention")],
    **{name: [{TYPES: [kind] * 4} for kind in ("conv", "full_attention")] for name in ("lfm2", "lfm2-moe")},
    **{
        name: [{TYPES: [kind] * 4} for kind in ("linear_attention", "full_attention")]
        for name in ("qwen3-next", "qwen3_5", "qwen3_5-moe", "granite-hybrid", "granite-hybrid-dense")
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "changed"), [(name, one) for name, every in ONE_KIND.items() for one in every])
def test_a_model_of_two_kinds_of_layers_may_have_one_of_them_alone(tmp_path, name, changed):
    """As tiny models have whose few layers come before the first one of the other kind."""
    check_served(write_model(tmp_path / "model", {**TINY[name]["config"], **changed}, {}))


@pytest.mark.parametrize(
    ("name", "key"),
    [*((name, "conv_L_cache") for name in ("lfm2", "lfm3-plain")), ("qwen3_5", "linear_conv_kernel_dim")],
)
def test_a_convolution_may_be_of_one_token(tmp_path, name, key):
    """A layer of it alone then has a state without numbers."""
    check_served(write_model(tmp_path / "model", {**TINY[name]["config"], key: 1}, {}))


def check_served(folder):
    """Every executor has the logits of transformers, and its tokens."""
    want = of_transformers(folder)
    assert want is not None
    for executor in EXECUTORS:
        [got] = all_logits(load_model(folder), [TEXT], in_chunks([TEXT], [5, 1]), executor, block_size=4)
        np.testing.assert_allclose(got, want, atol=2e-3)
    for executor, floats in FLOATS.items():
        with LLM(folder, executor=executor, block_size=4, max_num_batched_tokens=6, max_model_len=24, **floats) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            for _ in range(2):  # the second time the prefix is in the cache
                prompts = [TEXT[:n] for n in (14, 9, 1)]
                tokens = [output.outputs[0].token_ids[0] for output in llm.generate(prompts, greedy)]
                assert tokens == [int(want[len(prompt) - 1].argmax()) for prompt in prompts]


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe-lite", "youtu"])
def test_the_rows_of_rotary_parts_may_be_split_halves(tmp_path, name):
    check_served(write_model(tmp_path / "model", {**TINY[name]["config"], "rope_interleave": False}, {}))
