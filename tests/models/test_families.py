"""Every family on a tiny random model, against logits that transformers computed (tests/data/models/make_tiny.py)."""

import contextlib
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.families import FAMILIES, GGUF_FAMILIES
from foreword.models.families.base import GGUF_NAMES, SAFETENSORS_NAMES
from foreword.models.loader import load_model
from foreword.models.naming import split_halves
from foreword.models.quants import Quant
from foreword.models.weights import float_tensor
from models import gguf_writer
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model, write_safetensors

TINY = json.loads((Path(__file__).parents[1] / "data" / "models" / "tiny.json").read_text())["models"]


def make(tmp_path, name, **changes):
    tiny = TINY[name]
    return write_model(tmp_path / name, {**tiny["config"], **changes}, random_tensors(tiny["shapes"]))


def assert_logits(model, name, executor="numpy"):
    tiny = TINY[name]
    text, want = tiny["token_ids"], np.array(tiny["last_logits"])
    model = replace(model, spec=model.spec.for_length(len(text)))
    for sizes in ([len(text)], [5, 1]):
        [logits] = all_logits(model, [text], in_chunks([text], sizes), executor, block_size=4)
        np.testing.assert_allclose(logits[-len(want) :], want, atol=1e-4)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TINY)
def test_logits_are_transformers(tmp_path, name, executor):
    assert_logits(load_model(make(tmp_path, name)), name, executor)


def test_every_family_is_held_to_transformers():
    assert {tiny["config"]["model_type"] for tiny in TINY.values()} == set(FAMILIES)


def older(config):
    """The same configuration as transformers wrote it before version 5."""
    config = dict(config)
    parameters = config.pop("rope_parameters")
    if "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    config["rope_theta"] = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")}
    config["rope_scaling"] = {"type": parameters["rope_type"], **scaling} if scaling else None
    return config


@pytest.mark.parametrize("name", TINY)
def test_an_older_configuration_means_the_same(tmp_path, name):
    folder = make(tmp_path, name)
    new = load_model(folder).spec
    (folder / "config.json").write_text(json.dumps(older(TINY[name]["config"])))
    assert load_model(folder).spec == new


def test_the_first_name_of_longrope_is_understood(tmp_path):
    folder = make(tmp_path, "phi3-longrope")
    new = load_model(folder).spec
    config = older(TINY["phi3-longrope"]["config"])
    config["rope_scaling"]["type"] = "su"
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).spec == new


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2-sliding", "smollm3", "mistral"])
def test_layers_follow_the_familys_rule_where_the_configuration_does_not_list_them(tmp_path, name):
    folder = make(tmp_path, name)
    listed = load_model(folder).spec
    config = {k: v for k, v in TINY[name]["config"].items() if k not in ("layer_types", "no_rope_layers")}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).spec == listed


def interleave(tensor, head_dim):
    """The inverse of `split_halves`: rows as a llama GGUF file has them."""
    return tensor.reshape(-1, 2, head_dim // 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def test_splitting_halves_undoes_interleaving():
    rows = np.arange(12, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)
    mixed = interleave(rows, head_dim=6)
    assert mixed[:6, 0].tolist() == [0, 3, 1, 4, 2, 5]
    np.testing.assert_array_equal(split_halves(float_tensor(mixed), 6).dequantize(), rows)


KEYS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "attn_logit_softcapping": "attn_logit_softcapping",
          "final_logit_softcapping": "final_logit_softcapping"}  # fmt: skip


def as_gguf(path, tiny, spec, more=(), extra_tensors=()):
    """The tiny model as a GGUF file of its architecture."""
    config, tensors = tiny["config"], random_tensors(tiny["shapes"])
    family = FAMILIES[config["model_type"]]
    arch, rope = family.gguf, config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    metadata = {"general.architecture": ("str", arch), f"{arch}.rope.freq_base": ("f32", rope["rope_theta"])}
    metadata |= {f"{arch}.{k}": ("u32", config[v]) for k, v in KEYS.items() if config.get(v)}
    metadata |= {f"{arch}.{k}": ("f32", config[v]) for k, v in FLOATS.items() if config.get(v)}
    size = config["vocab_size"]
    tokens = [chr(0x100 + i) for i in range(size - 1)]
    metadata |= {"tokenizer.ggml.model": ("str", "gpt2"), "tokenizer.ggml.pre": ("str", "gpt-2"),
                 "tokenizer.ggml.tokens": ("[str]", [*tokens, tokens[0] + tokens[1]]),
                 "tokenizer.ggml.merges": ("[str]", [f"{tokens[0]} {tokens[1]}"]),
                 "tokenizer.ggml.token_type": ("[i32]", [1] * size),
                 "tokenizer.ggml.eos_token_id": ("u32", 2)}  # fmt: skip
    names = {**SAFETENSORS_NAMES, **family.names}
    written = {}
    for short, template in names.items():
        for i in range(spec.num_layers):
            here = [
                template.format(i=i, e=e)
                for e in range(config.get("num_experts") or config.get("num_local_experts") or 1)
            ]
            if here[0] not in tensors:
                continue
            value = np.stack([tensors[n] for n in here]) if "{e}" in template else tensors[here[0]]
            if short.endswith("_norm") and family.norms_less_one:
                value = value + np.float32(1)
            if short in ("q", "k") and family.gguf_interleaved:
                value = interleave(value, spec.head_dim)
            written[GGUF_NAMES[short].format(i=i)] = (Quant.F32, value.shape, gguf_writer.f32(value).ravel())
    return gguf_writer.write(path, metadata | dict(more), written | dict(extra_tensors))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama-linear-tied", {"llama.rope.scaling.type": ("str", "linear"), "llama.rope.scaling.factor": ("f32", 3)}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3-moe", None),
        ("qwen2-moe", None),
        ("gemma2", None),
    ],
)
def test_a_gguf_file_gives_the_same_weights_as_a_directory(tmp_path, name, more):
    """None: the format does not say everything this tiny model has, so the weights are compared alone."""
    directory = load_model(make(tmp_path, name))
    tiny = TINY[name]
    if more is not None:
        model = load_model(as_gguf(tmp_path / "model.gguf", tiny, directory.spec, more))
        assert model.eos_token_ids == (2,)
        assert_logits(model, name)
        return
    from foreword.models.gguf import read_gguf
    from foreword.models.naming import weights_from_gguf

    path = as_gguf(tmp_path / "model.gguf", tiny, directory.spec)
    family = FAMILIES[tiny["config"]["model_type"]]
    weights = weights_from_gguf(path, read_gguf(path).tensors, directory.spec, family)
    assert weights.keys() == directory.weights.keys()
    for key, tensor in weights.items():
        np.testing.assert_array_equal(tensor.dequantize(), directory.weights[key].dequantize(), err_msg=key)


def test_frequencies_are_divided_as_a_gguf_file_says(tmp_path):
    """A converted Llama 3 keeps its rotary scaling as one divisor a frequency."""
    directory = load_model(make(tmp_path, "llama3"))
    scaled = np.array(directory.spec.layers[0].rope.inv_freq)
    base = 500.0 ** -(np.arange(len(scaled)) / len(scaled))
    divisors = {"rope_freqs.weight": (Quant.F32, scaled.shape, gguf_writer.f32(base / scaled))}
    assert (base / scaled).max() > 7
    path = as_gguf(tmp_path / "model.gguf", TINY["llama3"], directory.spec, extra_tensors=divisors)
    assert_logits(load_model(path), "llama3")


def test_yarn_is_read_from_a_gguf_file(tmp_path):
    directory = load_model(make(tmp_path, "llama-yarn"))
    yarn = {"llama.rope.scaling.type": ("str", "yarn"), "llama.rope.scaling.factor": ("f32", 4),
            "llama.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
    path = as_gguf(tmp_path / "model.gguf", TINY["llama-yarn"], directory.spec, yarn)
    assert_logits(load_model(path), "llama-yarn")


def test_a_part_of_a_split_model_says_so(tmp_path):
    directory = load_model(make(tmp_path, "qwen2"))
    path = as_gguf(tmp_path / "a.gguf", TINY["qwen2"], directory.spec, {"split.count": ("u16", 3)})
    with pytest.raises(ModelError, match=r"a\.gguf: is one of 3 files"):
        load_model(path)


def test_gguf_architectures_have_their_families():
    assert set(GGUF_FAMILIES) == {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "resnet"}, r"config\.json: model_type 'resnet' is not supported\. Those .* gemma2, .*qwen2"),
        ({"model_type": None}, "model_type is missing"),
        (
            {"hidden_size": 64},
            r"tensor model\.embed_tokens\.weight \(embed\) has shape \(48, 32\), expected \(48, 64\)",
        ),
        ({"hidden_size": "32"}, "hidden_size is '32', not of type int"),
        ({"num_hidden_layers": 5}, r"tensor model\.layers\.4\.input_layernorm\.weight .* is missing"),
        ({"num_key_value_heads": 3}, "4 heads are not a multiple of 3"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not from 1 to"),
        ({"head_dim": 7}, "7 dimensions, not an even number"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic' is not supported"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, "llama3", **changes))


NONSENSE = [None, 0, -1, 1, 3, 2**31, 2**70, 1e300, 0.0, -2.5, float("nan"), "x", [], [1], {}, {"a": 1}, True]


@pytest.mark.parametrize("name", ["llama3", "llama-yarn", "qwen3-moe", "gemma3", "phi3-longrope", "smollm3"])
def test_no_nonsense_in_a_configuration_escapes_the_loader(tmp_path, name):
    folder = make(tmp_path, name)
    config = TINY[name]["config"]
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    changed = [{**config, key: value} for key in config for value in NONSENSE]
    changed += [{**config, "rope_parameters": {**rope, key: value}} for key in rope for value in NONSENSE]
    for values in changed:
        (folder / "config.json").write_text(json.dumps(values))
        with contextlib.suppress(ModelError):
            load_model(folder)


def test_no_flipped_byte_of_a_gguf_header_escapes_the_loader(tmp_path):
    directory = load_model(make(tmp_path, "qwen2"))
    path = as_gguf(tmp_path / "model.gguf", TINY["qwen2"], directory.spec)
    data = path.read_bytes()
    header = len(data) - sum(4 * int(np.prod(shape)) for shape in TINY["qwen2"]["shapes"].values())
    rng = np.random.default_rng(0)
    for at in rng.permutation(header)[:600]:
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            load_model(path)


def test_shards_are_read_through_their_index(tmp_path):
    folder = make(tmp_path, "qwen2")
    tensors = random_tensors(TINY["qwen2"]["shapes"])
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        write_safetensors(folder / shard, {n: tensors[n] for n in members})
    index = {"weight_map": {n: shard for shard, members in shards.items() for n in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_logits(load_model(folder), "qwen2")


def test_every_damage_of_a_safetensors_header_is_a_model_error(tmp_path):
    folder = make(tmp_path, "phi3")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for cut in [*range(0, header, 97), header, len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors|is missing"):
            load_model(folder)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, header, 150):
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            load_model(folder)


def test_files_and_names_that_are_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.gguf: there is no such file"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"has no config\.json and 0 \.gguf files"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="did you mean 'smollm2'"):
        load_model("smollm")
    folder = make(tmp_path, "llama3")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_model(folder)


def test_an_architecture_that_is_not_known_is_named(tmp_path):
    path = gguf_writer.write(tmp_path / "m.gguf", {"general.architecture": ("str", "mamba")}, {})
    with pytest.raises(ModelError, match=r"architecture 'mamba' is not supported\. .*gemma2, gemma3, llama"):
        load_model(path)


def fake_hub(monkeypatch, download):
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_hub_id_is_fetched_and_loaded(tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(make(tmp_path, "mistral"))

    fake_hub(monkeypatch, download)
    assert_logits(load_model("org/tiny-mistral"), "mistral")
    assert asked == [("org/tiny-mistral", ["*.json", "*.safetensors", "*.jinja"])]


def test_a_hub_that_cannot_be_reached_is_a_model_error(monkeypatch):
    def refuse(name, allow_patterns):
        raise ConnectionError("no route\nand more")

    fake_hub(monkeypatch, refuse)
    with pytest.raises(ModelError, match=r"org/model: the hub says: no route\. Check .* known names are smollm2"):
        load_model("org/model")


def test_a_hub_id_without_the_hubs_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install foreword\[hub\]"):
        load_model("org/model")
