"""Every GGUF architecture on a tiny random model: the logits of transformers, or of the model's directory."""

import contextlib
import re

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.families import GGUF_FAMILIES
from foreword.models.gguf import read_gguf
from foreword.models.loader import load_model
from foreword.models.naming import split_halves
from foreword.models.quants import Quant
from foreword.models.weights import float_tensor
from models import gguf_models, gguf_writer
from models.gguf_models import (
    ARCHITECTURES,
    ELSEWHERE,
    MORE_ARCHITECTURES,
    architecture_of,
    experts_everywhere,
    interleave,
    write,
)
from models.recorded import TINY, assert_logits
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model

FREQUENCIES = np.array(TINY["llama3"]["config"]["rope_parameters"]["rope_theta"]) ** -(np.arange(4) / 4)


def as_gguf(tmp_path, name, more=(), extra_tensors=()):
    tiny = TINY[name]
    return write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more, extra_tensors)


def linear(architecture, factor):
    return {
        f"{architecture}.rope.scaling.type": ("str", "linear"),
        f"{architecture}.rope.scaling.factor": ("f32", factor),
    }


YARN = {"llama.rope.scaling.type": ("str", "yarn"), "llama.rope.scaling.factor": ("f32", 4),
        "llama.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
HALF = ("u32", 6)  # half of the heads of 12
OLMO3 = {"olmo2.rope.scaling.type": ("str", "yarn"), "olmo2.rope.scaling.factor": ("f32", 4),
         "olmo2.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
GPT_OSS = {"gpt-oss.rope.scaling.type": ("str", "yarn"), "gpt-oss.rope.scaling.factor": ("f32", 4),
           "gpt-oss.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
DEEPSEEK = {"deepseek2.rope.scaling.type": ("str", "yarn"), "deepseek2.rope.scaling.factor": ("f32", 4),
            "deepseek2.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
MINISTRAL = {"mistral3.rope.scaling.type": ("str", "yarn"), "mistral3.rope.scaling.factor": ("f32", 4),
             "mistral3.rope.scaling.original_context_length": ("u32", 8),
             "mistral3.rope.scaling.yarn_log_multiplier": ("f32", 1.0),
             "mistral3.attention.temperature_scale": ("f32", 0.4),
             "mistral3.rope.scaling.yarn_beta_fast": ("f32", 32.0),
             "mistral3.rope.scaling.yarn_beta_slow": ("f32", 1.0)}  # fmt: skip
MSCALE = {**TINY["deepseek-v3"]["config"]["rope_parameters"], "mscale": 0.7}
WITH_TRANSFORMERS_LOGITS = {
    "deepseek-v2": (DEEPSEEK, {}),
    **{name: ({}, {}) for name in ("ernie4_5", "arcee", "seed-oss", "olmo2", "starcoder2", "granite", "granite-moe")},
    **{name: ({}, {}) for name in ("granite-moe-shared", "granite-hybrid", "granite-hybrid-dense", "nemotron-h")},
    **dict.fromkeys(
        ("lfm2", "minicpm", "falcon-h1", "falcon-h1-normed-last", "nemotron-h-latent"), ({}, {})
    ),
    **dict.fromkeys(("mamba2", "mamba2-plain", "mamba", "mamba-plain", "falcon-mamba-even"), ({}, {})),
    **dict.fromkeys(("jamba", "jamba-dense", "kimi-linear", "bailing-hybrid"), ({}, {})),
    **dict.fromkeys(("glm-moe-dsa", "glm-moe-dsa-all"), ({}, {})),
    "olmo3": (OLMO3, {}),
    **dict.fromkeys(("llama-biases", "olmo2-biases", "afmoe", "cohere", "cohere2", "olmo", "hunyuan"), ({}, {})),
    "hunyuan-moe": ({key.replace("llama", "hunyuan-moe"): value for key, value in YARN.items()}, {}),
    "ministral3": (MINISTRAL, {}),
    **dict.fromkeys(("bitnet", "apertus", "apertus-biased"), ({}, {})),
    **{name: ({}, {}) for name in ("gemma", "exaone4-full", "jais2", "iquestcoder")},
    "solar-open": ({"glm4moe.rope.dimension_count": ("u32", 12)}, {}),
    "youtu": (DEEPSEEK, {}),
    "nemotron": ({"nemotron.rope.dimension_count": HALF}, {}),
    "stablelm": ({"stablelm.rope.dimension_count": ("u32", 4)}, {}),
    **{name: ({}, {}) for name in ("ernie4_5-moe", "olmoe", "gemma3n", "gemma4", "gemma4-plain", "gemma4-moe")},
    "minimax-m2": ({"minimax-m2.rope.dimension_count": HALF}, {}),
    "glm4": ({"glm4.rope.dimension_count": HALF}, {}),
    "glm4-moe": ({"glm4moe.rope.dimension_count": HALF}, {}),
    "qwen3_5": (
        {"qwen35.rope.dimension_count": ("u32", 8), "qwen35.rope.dimension_sections": ("[i32]", [2, 1, 1, 0])}, {}
    ),
    "qwen3_5-moe": ({"qwen35moe.rope.dimension_count": ("u32", 8)}, {}),
    "llama-linear-tied": (linear("llama", 3), {}),
    "llama-yarn": (YARN, {}),
    "mixtral": ({}, {}),
    "mistral": ({}, {}),
    "smollm3": ({"smollm3.rope.dimension_count": ("u32", 8)}, {}),
    "qwen2": ({}, {}),
    "qwen3": ({}, {}),
    **dict.fromkeys(("gpt2", "starcoder", "starcoder-heads", "falcon", "falcon-two-norms", "falcon-grouped"), ({}, {})),
    **dict.fromkeys(("cohere-plus", "exaone-moe"), ({}, {})),
    **dict.fromkeys(("internlm2", "deepseek", "bailing", "cohere2-moe", "olmo-limited"), ({}, {})),
    "laguna": ({"laguna.rope.dimension_count": HALF}, {}),
    "exaone": gguf_models.rotary(TINY["exaone"]["config"]),
    "bailing2": ({"bailingmoe2.rope.dimension_count": HALF}, {}),
    "glm": ({"chatglm.rope.dimension_count": HALF}, {}),
    **dict.fromkeys(("bloom", "bloom-untied", "mpt", "dbrx"), ({}, {})),
    "gpt-neox": ({"gptneox.rope.dimension_count": ("u32", 4)}, {}),
    "phi": ({"phi2.rope.dimension_count": ("u32", 4)}, {}),
    "stablelm-normed": ({"stablelm.rope.dimension_count": ("u32", 4)}, {}),
    "stablelm-parallel": ({"stablelm.rope.dimension_count": ("u32", 4)}, {}),
    "qwen3-vl-moe": ({"qwen3vlmoe.rope.dimension_sections": ("[i32]", [2, 2, 2, 0])}, {}),
    "phi3": ({"phi3.rope.dimension_count": ("u32", 8)}, {}),
    **{
        name: gguf_models.rotary(TINY[name]["config"])
        for name in ("phi3-longrope", "phi3-longrope-past", "phi3-longrope-half-past")
    },
}  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", WITH_TRANSFORMERS_LOGITS)
def test_a_file_gives_the_logits_of_transformers(tmp_path, name, executor):
    model = load_model(as_gguf(tmp_path, name, *WITH_TRANSFORMERS_LOGITS[name]))
    assert model.eos_token_ids == (2,)
    assert_logits(model, name, executor)


LOCAL = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
# Settings that GGUF cannot express are changed in the directory: (changes, more metadata).
LIKE_A_DIRECTORY = {
    "gpt-oss": ({"swiglu_limit": 7.0}, GPT_OSS),
    **{
        f"deepseek-v3, {kind}": (
            {"rope_parameters": MSCALE, "old_file": kind == "kv_b in one"},
            DEEPSEEK | {"deepseek2.rope.scaling.yarn_log_multiplier": ("f32", 0.07)},
        )
        for kind in ("k_b and v_b apart", "kv_b in one")
    },
    "deepseek-v32": (
        {"rope_parameters": MSCALE},
        {key.replace("deepseek2", "deepseek32"): value for key, value in DEEPSEEK.items()}
        | {"deepseek32.rope.scaling.yarn_log_multiplier": ("f32", 0.07)},
    ),
    "phimoe": ({"router_jitter_noise": 0.01}, {}),
    "mimo-v2": (
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}, {"mimo2.rope.dimension_count": HALF}
    ),
    "llama4": ({**LLAMA4, "rope_parameters": {"rope_theta": 500.0}}, {}),
    "dots1": ({"sliding_window": None, "layer_types": None}, {}),
    "mpt-limited": ({"attn_config": {"alibi_bias_max": 8, "clip_qkv": 0.4}}, {}),
    "minicpm3": ({"scale_emb": 12.0, "dim_model_base": 256}, {}),
    "lfm2-moe": ({"routed_scaling_factor": 1.0}, {"lfm2moe.expert_gating_func": ("u32", 2)}),
    "mellum": (
        {"mlp_layer_types": ["sparse"] * 4}, {key.replace("olmo2", "mellum"): value for key, value in OLMO3.items()}
    ),
    "qwen2-moe": ({"decoder_sparse_step": 1}, {}),
    "qwen3-moe": ({"mlp_only_layers": []}, {}),
    "qwen3-next": ({"mlp_only_layers": []}, {"qwen3next.rope.dimension_count": ("u32", 4)}),
    "gemma2": ({"query_pre_attn_scalar": 8}, {}),
    "gemma3": (
        {"query_pre_attn_scalar": 8},
        linear("gemma3", 2.0) | {"gemma3.rope.freq_base_swa": ("f32", 100.0)},
    ),
    "gemma3, default local base": ({"query_pre_attn_scalar": 8, "rope_parameters": LOCAL}, linear("gemma3", 2.0)),
    "gemma3, every third full": (
        {"query_pre_attn_scalar": 8, "rope_parameters": LOCAL, "layer_types": None, "sliding_window_pattern": 3},
        linear("gemma3", 2.0) | {"gemma3.attention.sliding_window_pattern": ("u32", 3)},
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", LIKE_A_DIRECTORY)
def test_a_file_gives_the_logits_of_a_directory(tmp_path, case, executor):
    name = case.split(",")[0]
    changes, more = LIKE_A_DIRECTORY[case]
    config = {**TINY[name]["config"], **changes}
    sparse = name == "mellum" or (name.startswith("qwen") and name.endswith(("-moe", "-next")))
    shapes = experts_everywhere(TINY[name], 3) if sparse else TINY[name]["shapes"]
    tensors = random_tensors(shapes)
    directory = load_model(write_model(tmp_path / "directory", config, tensors))
    model = load_model(write(tmp_path / "model.gguf", config, tensors, more))
    text = TINY[name]["token_ids"]
    [want] = all_logits(directory, [text], in_chunks([text], [len(text)]), executor, block_size=4)
    for sizes in ([len(text)], [5, 1]):
        [found] = all_logits(model, [text], in_chunks([text], sizes), executor, block_size=4)
        np.testing.assert_allclose(found, want, atol=1e-4)
    assert want.std() > 0.3


REFUSED = {
    "cohere2-moe": [{"cohere2moe.expert_gating_func": ("u32", 3)}],
    **{
        name: [
            {f"{name}.attention.sliding_window": ("u32", 0)},
            {f"{name}.attention.sliding_window_pattern": ("u32", 0)},
        ]
        for name in ("laguna", "mellum")
    },
}


@pytest.mark.parametrize(("name", "more"), [(name, more) for name, every in REFUSED.items() for more in every])
def test_a_value_that_is_not_computed_is_refused_with_its_key(tmp_path, name, more):
    config = gguf_models.expressible(TINY[name]["config"])
    path = write(tmp_path / "model.gguf", config, random_tensors(TINY[name]["shapes"]), more)
    [key] = more
    with pytest.raises(ModelError, match=rf"{re.escape(key)} = \d"):
        load_model(path)


def test_the_probabilities_of_a_softmax_of_all_experts_may_keep_their_sum(tmp_path):
    tiny, more = TINY["cohere2-moe"], {"cohere2moe.expert_weights_norm": ("bool", False)}
    found = [
        load_model(write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), one)).spec.layers[-1]
        for one in (more, {})
    ]
    assert [layer.moe.norm_topk for layer in found] == [False, True]


def with_gate_and_up(arrays, layers):
    """The tensors of a file with gate and up of all experts of a layer in one, in these layers."""
    fused = {}
    for name, value in arrays.items():
        if not name.startswith(tuple(f"blk.{i}." for i in layers)):
            fused[name] = value
        elif ".ffn_gate_exps." in name:
            up = arrays[name.replace("ffn_gate_exps", "ffn_up_exps")]
            fused[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = np.concatenate([value, up], axis=1)
        elif ".ffn_up_exps." not in name:
            fused[name] = value
    return fused


@pytest.mark.parametrize("layers", [range(8), [2]], ids=["all", "one"])
@pytest.mark.parametrize(
    "name", ["qwen2-moe", "mixtral", "deepseek-v2", "glm4-moe", "gpt-oss", "lfm2-moe", "qwen3_5-moe"]
)
def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path, monkeypatch, name, layers):
    tensors = random_tensors(experts_everywhere(TINY[name], 3) if name == "qwen2-moe" else TINY[name]["shapes"])
    more = {**WITH_TRANSFORMERS_LOGITS, "gpt-oss": (GPT_OSS, {})}.get(name, ({}, {}))[0]
    want = load_model(write(tmp_path / "apart.gguf", TINY[name]["config"], tensors, more)).weights
    usual = gguf_models.gguf_tensors
    monkeypatch.setattr(gguf_models, "gguf_tensors", lambda *given: with_gate_and_up(usual(*given), layers))
    path = write(tmp_path / "one.gguf", TINY[name]["config"], tensors, more)
    assert any("ffn_gate_up_exps" in tensor for tensor in read_gguf(path).tensors)
    found = load_model(path).weights
    assert found.keys() == want.keys()
    for tensor in want:
        np.testing.assert_array_equal(found[tensor].dequantize(), want[tensor].dequantize())


def test_every_architecture_is_tested():
    names = [*WITH_TRANSFORMERS_LOGITS, *(case.split(",")[0] for case in LIKE_A_DIRECTORY)]
    assert {architecture_of(TINY[name]["config"]) for name in names} == set(GGUF_FAMILIES) - ELSEWHERE
    assert set(GGUF_FAMILIES) == {*ARCHITECTURES.values(), *MORE_ARCHITECTURES}


def test_frequencies_are_divided_by_the_tensor_of_a_file(tmp_path):
    """A converted Llama 3 has its rotary scaling as one divisor per frequency."""
    directory = load_model(
        write_model(tmp_path / "llama3", TINY["llama3"]["config"], random_tensors(TINY["llama3"]["shapes"]))
    )
    divisors = FREQUENCIES / np.array(directory.spec.layers[0].rope.inv_freq)
    assert divisors.max() > 7
    assert_logits(load_model(as_gguf(tmp_path, "llama3", (), {"rope_freqs.weight": divisors})), "llama3")


def test_gemma2_without_caps_in_the_file_has_the_default_caps(tmp_path):
    config = {k: v for k, v in TINY["gemma2"]["config"].items() if "softcapping" not in k}
    path = write(tmp_path / "model.gguf", config, random_tensors(TINY["gemma2"]["shapes"]))
    spec = load_model(path).spec
    assert (spec.attn_softcap, spec.final_softcap) == (50.0, 30.0)


def test_minicpm_without_scales_in_the_file_has_those_of_the_first_model(tmp_path):
    tiny = TINY["minicpm"]
    config = tiny["config"] | {"scale_emb": 0, "scale_depth": 0}
    more = {f"minicpm.{name}": ("f32", 0) for name in ("embedding_scale", "residual_scale", "logit_scale")}
    metadata = {name: typed for name, typed in gguf_models.metadata(config).items() if name not in more}
    arrays = gguf_models.gguf_tensors(config, random_tensors(tiny["shapes"]))
    tensors = {name: (Quant.F32, array.shape, gguf_writer.f32(array).ravel()) for name, array in arrays.items()}
    spec = load_model(gguf_writer.write(tmp_path / "model.gguf", metadata, tensors)).spec
    scales = spec.embedding_scale, spec.residual_scale, spec.logit_scale
    assert scales == pytest.approx((12, 1.4 / 2, 256 / 32))


def test_the_length_at_which_queries_grow_may_differ_from_the_original_one(tmp_path):
    more = {"mistral3.attention.temperature_length": ("u32", 5)}
    assert load_model(as_gguf(tmp_path, "ministral3", MINISTRAL | more)).spec.layers[0].query_growth.interval == 5
    del (without := MINISTRAL | more)["mistral3.attention.temperature_scale"]
    assert load_model(as_gguf(tmp_path, "ministral3", without)).spec.layers[0].query_growth is None


@pytest.mark.parametrize("name", ["glm4", "nemotron", "solar-open", "gpt-neox"])
def test_heads_rotate_whole_where_a_file_does_not_say_how_many_dimensions(tmp_path, name):
    """llama.cpp reads such files so, whatever part a config.json without the key means."""
    spec = load_model(as_gguf(tmp_path, name)).spec
    assert 2 * len(spec.layers[0].rope.inv_freq) == spec.head_dim


def test_a_number_of_an_activation_may_be_one_for_all_layers(tmp_path):
    weights = load_model(as_gguf(tmp_path, "apertus", {"xielu.beta": ("f32", 0.25)})).weights
    assert [weights[f"layers.{i}.beta"].dequantize().tolist() for i in range(4)] == [[0.25]] * 4
    for value in (("[f32]", [0.5, 0.5]), ("[i32]", [1, 1, 1, 1])):
        with pytest.raises(ModelError, match=r"metadata xielu\.beta has no number for each of 4 layers"):
            load_model(as_gguf(tmp_path, "apertus", {"xielu.beta": value}))


def test_bitnet_without_an_activation_in_the_file_has_silu(tmp_path):
    tied = load_model(as_gguf(tmp_path, "bitnet-tied", {"bitnet.rope.scaling.type": ("str", "none")})).spec
    other = load_model(as_gguf(tmp_path, "bitnet")).spec
    assert (tied.activation, other.activation) == ("silu", "relu2")


@pytest.mark.parametrize("window", [0, 6])
def test_layers_that_rotate_within_their_window_alone_need_one(tmp_path, window):
    """EXAONE 4 is published without windows, and then rotates in every layer; Trinity and Command R7B are not."""
    metadata = {"exaone4.attention.sliding_window": ("u32", window)}
    spec = load_model(as_gguf(tmp_path, "exaone4-full", metadata)).spec
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, bool(window)]
    for name in () if window else ("afmoe", "cohere2"):
        with pytest.raises(ModelError, match="sliding_window = 0, but some layers are sliding"):
            load_model(as_gguf(tmp_path, name, {f"{name}.attention.sliding_window": ("u32", window)}))


@pytest.mark.parametrize("rotated", [0, 4, 6])
def test_splitting_halves_undoes_interleaving(rotated):
    rows = np.arange(12, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)
    mixed = interleave(rows, head_dim=6, rotated=rotated) if rotated else rows
    assert mixed[:6, 0].tolist() == {0: [0, 1, 2, 3, 4, 5], 4: [0, 2, 1, 3, 4, 5], 6: [0, 3, 1, 4, 2, 5]}[rotated]
    np.testing.assert_array_equal(split_halves(float_tensor(mixed), 6, rotated).dequantize(), rows)


@pytest.mark.parametrize("extra", ["blk.1.attn_k.bias", "blk.0.ffn_gate_inp.weight", "output.bias"])
def test_an_unused_tensor_is_refused(tmp_path, extra):
    path = as_gguf(tmp_path, "llama-linear-tied", (), {extra: np.zeros(32, np.float32)})
    with pytest.raises(ModelError, match=rf"model\.gguf: tensor {re.escape(extra)} is not part of a llama model"):
        load_model(path)


def test_a_bias_that_files_have_no_tensor_for_is_refused(tmp_path):
    tiny = TINY["ernie4_5-moe-biased"]
    path = gguf_models.write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]))
    with pytest.raises(ModelError, match=r"no tensor for layers\.\d+\.shared\.gate_bias\. Use a directory"):
        load_model(path)


def test_one_file_of_a_split_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"model\.gguf: is one of 3 files"):
        load_model(as_gguf(tmp_path, "qwen2", {"split.count": ("u16", 3)}))
    with pytest.raises(ModelError, match=r"split\.count is .*, not of type int"):
        load_model(as_gguf(tmp_path, "qwen2", {"split.count": ("[i32]", [1, 2])}))


def test_an_unsupported_architecture_is_named(tmp_path):
    path = gguf_writer.write(tmp_path / "m.gguf", {"general.architecture": ("str", "rwkv7")}, {})
    with pytest.raises(
        ModelError, match=r"architecture 'rwkv7' is not supported\. Supported .*gemma2, gemma3, .*llama"
    ):
        load_model(path)


def test_layers_with_a_state_may_be_listed(tmp_path):
    """The layers of heads for further tokens are listed, too."""
    key, usual = "qwen35.attention.recurrent_layers", load_model(as_gguf(tmp_path, "qwen3_5")).spec
    listed = [layer.recurrent is not None for layer in usual.layers]
    more = {"qwen35.full_attention_interval": ("u32", 7)}
    assert load_model(as_gguf(tmp_path, "qwen3_5", more | {key: ("[bool]", [*listed, False])})).spec == usual
    with pytest.raises(ModelError, match=r"recurrent_layers .* does not say of each layer"):
        load_model(as_gguf(tmp_path, "qwen3_5", more | {key: ("[bool]", listed[:-1])}))


def test_rates_of_recurrent_layers_that_cannot_be_are_refused(tmp_path):
    tiny = TINY["qwen3-next"]
    config, tensors = tiny["config"] | {"mlp_only_layers": []}, random_tensors(experts_everywhere(tiny, 0))
    path = write(tmp_path / "model.gguf", config, tensors, (), {"blk.1.ssm_a": np.array([-1, -2, 0.5, -1])})
    with pytest.raises(ModelError, match="the rates of layer 1"):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "key"),
    [("phi3", "attn_qkv"), ("phi3", "ffn_up"), ("mixtral", "ffn_gate_exps"), ("mixtral", "ffn_down_exps")],
)
def test_a_tensor_of_several_weights_that_is_longer_is_refused_with_both_shapes(tmp_path, name, key):
    array = gguf_models.gguf_tensors(TINY[name]["config"], random_tensors(TINY[name]["shapes"]))[f"blk.0.{key}.weight"]
    extra = {f"blk.0.{key}.weight": np.concatenate([array] * 2)}
    path = as_gguf(tmp_path, name, WITH_TRANSFORMERS_LOGITS[name][0], extra)
    shapes = f"has shape {extra[f'blk.0.{key}.weight'].shape}, expected {array.shape}"
    with pytest.raises(ModelError, match=re.escape(f"tensor blk.0.{key}.weight {shapes}")):
        load_model(path)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["qwen2", "phi3-longrope"])
def test_any_flipped_byte_of_a_header_is_loaded_or_a_model_error(tmp_path, name):
    path = as_gguf(tmp_path, name, *WITH_TRANSFORMERS_LOGITS[name])
    data = path.read_bytes()
    header = len(data) - sum(4 * int(np.prod(shape)) for shape in TINY[name]["shapes"].values())
    rng = np.random.default_rng(0)
    for at in rng.permutation(header)[:600]:
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            load_model(path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3n", "feed_forward_length", ("[i32]", [40])),
        ("gemma3n", "attention.sliding_window_pattern", ("[bool]", [True])),
        ("gemma3n", "attention.shared_kv_layers", ("u32", 15)),
        ("gemma3n", "activation_sparsity_scale", ("[f32]", [1.0])),
        ("gemma4", "feed_forward_length", ("[i32]", [40])),
        ("gemma4", "attention.sliding_window_pattern", ("[bool]", [True])),
        ("gemma4", "attention.head_count_kv", ("[i32]", [1])),
        ("gemma4-moe", "expert_used_count", ("u32", 99)),
        ("mixtral", "expert_used_count", ("u32", 99)),
    ],
)
def test_an_error_names_the_key_that_the_file_has(tmp_path, name, key, value):
    architecture = "llama" if name == "mixtral" else name.partition("-")[0]
    path = as_gguf(tmp_path, name, {f"{architecture}.{key}": value})
    with pytest.raises(ModelError, match=rf"model\.gguf: {re.escape(architecture)}\.{re.escape(key)} "):
        load_model(path)


@pytest.mark.parametrize("name", ["granite-hybrid", "nemotron-h", "falcon-h1"])
def test_convolutions_of_states_may_have_no_bias(tmp_path, name):
    key = "use_conv_bias" if name == "nemotron-h" else "mamba_conv_bias"
    config = {**TINY[name]["config"], key: False}
    shapes = {name: shape for name, shape in TINY[name]["shapes"].items() if not name.endswith("conv1d.bias")}
    assert_same_as_directory(tmp_path, config, random_tensors(shapes))


@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_no_layer_needs_attention(tmp_path, name):
    """Such a file has no key/value heads in any layer."""
    tiny, layer = TINY[name], re.compile(r"model\.layers\.\d+\.")
    kind = "conv" if name == "lfm2" else "linear_attention"
    first = {layer.sub("", name): shape for name, shape in tiny["shapes"].items() if name.startswith("model.layers.0.")}
    shapes = {name: shape for name, shape in tiny["shapes"].items() if not layer.match(name)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in first.items()}
    assert_same_as_directory(tmp_path, {**tiny["config"], "layer_types": [kind] * 4}, random_tensors(shapes))


def assert_same_as_directory(tmp_path, config, tensors):
    """A file gives the logits of a directory with the same tensors."""
    text = np.random.default_rng(5).integers(3, config["vocab_size"], 14).tolist()
    directory = load_model(write_model(tmp_path / "directory", config, tensors))
    model = load_model(write(tmp_path / "model.gguf", config, tensors))
    [want] = all_logits(directory, [text], in_chunks([text], [len(text)]))
    [found] = all_logits(model, [text], in_chunks([text], [5, 1]))
    np.testing.assert_allclose(found, want, atol=1e-4)
