"""The keys of model files: those of reference implementations are computed or refused by name, never passed over."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import Config, config_from_gguf
from foreword.models.families import ENCODER_FAMILIES, FAMILIES, GGUF_FAMILIES
from foreword.models.families.encoder_base import no_head
from foreword.models.gguf import GGUF
from foreword.models.keys import WITHOUT_EFFECT, Key, only, table
from foreword.models.loader import load_model
from foreword.models.pooling import GGUF_DENSE
from models.gguf_models import ARCHITECTURES, architecture_of, metadata, write
from models.pooling_models import POOLING
from models.recorded import TINY, make
from models.reference_keys import RECORD
from models.tiny import random_tensors, write_model

REFERENCE = json.loads(RECORD.read_text())
ALL = {**FAMILIES, **ENCODER_FAMILIES}
PER_LAYER_TYPE = {
    "laguna",
    "gemma3_text",
    "gemma3n_text",
    "embedding_gemma2_text",
    "gemma4_text",
    "gemma4_unified_text",
    "lfm3",
    "mellum",
    "mimo_v2_flash",
    "modernbert",
    "modernbert-decoder",
    "olmo3",
}  # their types of layers have their own rotary embeddings
COMPLETED = {
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "lfm2_moe": {"layer_types": ["full_attention", *["conv"] * 31]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "bailing_moe": {"num_key_value_heads": 16, "moe_intermediate_size": 1408},
    "bailing_hybrid": {"head_dim": 128},
    "electra": {"embedding_size": 256},
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": None},
}
"""Where the defaults of a reference are of a model that is refused: without kinds of layers, with experts, without
their number or their number per token, or with an odd number of dimensions that rotate; or where it writes another
value than it has read.
"""
DENSE = {f"*.{name}_feat_{side}" for name in GGUF_DENSE for side in ("in", "out")}
LOADER = {"architectures", "model_type"}  # which choose the family
PATH = Path("config.json")


def base(model_type):
    """The configuration that transformers writes for the defaults of a family."""
    return REFERENCE["families"][model_type]["defaults"] | COMPLETED.get(model_type, {})


def undeclared(model_type, defaults):
    family = ALL[model_type]
    names = {*(key.label for key in family.keys.values()), *family.other_names}
    return [key for key in defaults if key not in {*family.keys, *names, *WITHOUT_EFFECT, *LOADER}]


def test_the_reference_of_every_family_is_recorded():
    assert REFERENCE["families"].keys() == ALL.keys()
    assert REFERENCE["gguf"].keys() - {"every"} == GGUF_FAMILIES.keys()


@pytest.mark.parametrize("model_type", ALL)
def test_every_key_of_the_reference_is_declared(model_type):
    assert undeclared(model_type, base(model_type)) == []
    assert undeclared(model_type, REFERENCE["families"][model_type]["older"]) == []


@pytest.mark.parametrize("architecture", GGUF_FAMILIES)
def test_every_key_of_gguf_files_that_the_reference_reads_is_declared(architecture):
    names = {key.gguf for key in GGUF_FAMILIES[architecture].keys.values()}
    read = REFERENCE["gguf"]["every"] + REFERENCE["gguf"][architecture]
    assert [
        key for key in read if key not in names and not key.startswith(("rope.scaling.", "rope.scale_linear"))
    ] == []


@pytest.mark.parametrize("model_type", ALL)
def test_a_key_that_is_absent_has_the_value_of_the_reference(model_type):
    config, family = base(model_type), ALL[model_type]
    want = family.read(Config(PATH, config))
    for key in config:
        values = {name: value for name, value in config.items() if name != key}
        with contextlib.suppress(ModelError):  # it is required
            assert family.read(Config(PATH, values)) == want, key


def outcome(model_type, config):
    """The spec of a configuration, or the error that refuses it."""
    try:
        return ALL[model_type].read(Config(PATH, config))
    except ModelError as error:
        return str(error)


ALIASES = [
    (model_type, alias, key)
    for model_type, family in FAMILIES.items()
    for alias, key in {**REFERENCE["families"][model_type]["aliases"], **family.aliases}.items()
    if key in family.keys
]


@pytest.mark.parametrize(("model_type", "alias", "key"), ALIASES)
def test_another_name_of_a_key_is_followed_as_by_the_reference_or_refused(model_type, alias, key):
    config = {name: value for name, value in base(model_type).items() if name not in ("qk_head_dim", alias)}
    value = config[key]
    other = not value if isinstance(value, bool) else 2 * value if isinstance(value, int | float) else value
    without = {name: value for name, value in config.items() if name != key}
    got, want = (outcome(model_type, {**without, name: other}) for name in (alias, key))
    assert got == want or f"{alias} = {other!r} is not supported" in got


OWN = [(model_type, key) for model_type, family in FAMILIES.items() for key in family.keys.values() if key.own]


@pytest.mark.parametrize(("model_type", "key"), OWN, ids=lambda value: getattr(value, "own", value))
def test_the_usual_name_of_a_key_has_an_effect_only_where_it_has_one_in_the_reference(model_type, key):
    reference = REFERENCE["families"][model_type]
    assert key.is_alias == (reference["aliases"].get(key.name) == key.own)
    if key.is_alias or key.name in reference["defaults"]:
        return
    config = {name: value for name, value in base(model_type).items() if name != "rope_parameters"}
    value = {"relu": "silu"}.get(key.default, "relu") if key.name == "hidden_act" else 0.125
    given = config.get(key.own) or key.default
    if given is not None:
        assert ALL[model_type].read(Config(PATH, config | {key.name: given})) == ALL[model_type].read(
            Config(PATH, config)
        )
    with pytest.raises(ModelError, match=rf"{key.name} = .* no effect in the reference, which reads {key.own}\. Use"):
        ALL[model_type].read(Config(PATH, config | {key.name: value}))


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("gpt2", {"n_inner": None, "intermediate_size": 3072}),  # four times hidden_size
        ("gpt2", {"hidden_act": "gelu_pytorch_tanh"}),
        ("falcon", {"num_kv_heads": 4, "num_key_value_heads": 1}),  # with multi_query
        (
            "gpt_neox",
            {
                "partial_rotary_factor": 0.5,
                "rope_theta": 500.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        ),
    ],
)
def test_the_usual_name_of_a_key_may_have_the_value_that_is_computed(model_type, values):
    usual = [key.name for key in FAMILIES[model_type].keys.values() if key.own]
    without = {name: value for name, value in values.items() if name not in usual}
    assert outcome(model_type, base(model_type) | values) == ALL[model_type].read(
        Config(PATH, base(model_type) | without)
    )


def test_a_key_with_two_values_by_two_names_is_refused_with_both():
    config = base("ernie4_5_moe") | {"moe_k": 6, "num_experts_per_tok": 2}
    with pytest.raises(ModelError, match=r"^config\.json: num_experts_per_tok = 2, moe_k = 6\. Use"):
        FAMILIES["ernie4_5_moe"].read(Config(PATH, config))


def variants(model_type):
    """Configurations of a family that between them have all its features, and their form in GGUF files."""
    tiny = [
        tiny["config"] for tiny in (*TINY.values(), *POOLING.values()) if tiny["config"]["model_type"] == model_type
    ]
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    if model_type in PER_LAYER_TYPE:
        yarn = {"full_attention": yarn, "sliding_attention": yarn}
    if model_type == "zaya":
        yarn = {"hybrid": yarn}
    is_fixed = (
        model_type in ("phi3", "phimoe", "recurrent_gemma")
        or ALL[model_type].keys.get("rope_parameters", Key("")).values
    )
    yarns = [] if is_fixed else [base(model_type) | {"rope_parameters": yarn}]
    for values in (base(model_type), *yarns, *tiny):
        yield Config(PATH, values)
    if (family := FAMILIES.get(model_type)) and family.gguf:
        for values in (tiny["config"] for tiny in (*TINY.values(), *POOLING.values())):
            if values["model_type"] in ARCHITECTURES and GGUF_FAMILIES[architecture_of(values)] is family:
                yield config_from_gguf(GGUF(PATH, 3, plain(metadata(values)), {}), family.keys)


def plain(typed):
    return {key: value for key, (_, value) in typed.items()}


@pytest.mark.parametrize("model_type", ALL)
def test_every_declared_key_is_read(model_type):
    """Reading a key that is not declared raises KeyError."""
    family, read = ALL[model_type], {"pooling_type", *DENSE}  # by the loader
    for config in variants(model_type):
        config = replace(config, values={"vocab_size": 48, **config.values})
        family.read(config)
        if model_type in ENCODER_FAMILIES:
            own = family.declared(config)
            if family.head is not no_head:
                family.head(own, 2), family.head_pooling(own)
        else:
            own = replace(config, keys=family.keys)
            family.head_pooling(own)
            if family.projection is not None:
                own.size(family.projection[1])
        read |= config.read
    assert {key for key, row in family.keys.items() if not row.values} <= read


@pytest.mark.parametrize("model_type", ALL)
def test_a_value_that_is_not_computed_is_refused_with_key_value_and_fix(model_type):
    config, keys = base(model_type), ALL[model_type].keys
    for key, row in keys.items():
        prefix = "arch." if key.startswith("*.") else ""  # only GGUF files have it
        for value in row.values:
            Config(PATH, {**config, key: value}, keys=keys, prefix=prefix).check()
        if row.values:
            label = re.escape(row.label.replace("*.", prefix))
            with pytest.raises(
                ModelError, match=rf"^config\.json: {label} = 'nonsense' is not supported\. Use a model with"
            ):
                Config(PATH, {**config, key: "nonsense"}, keys=keys, prefix=prefix).check()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"hidden_act": "mish"}),
        ("mistral", {"is_causal": False}),
        ("llama3", {"v_head_dim": 4}),
        ("phi3", {"is_causal": False}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"hidden_activation": "mish"}),
    ],
)
def test_a_directory_with_a_value_that_is_not_computed_is_refused(tmp_path, name, changes):
    [(key, value)] = changes.items()
    with pytest.raises(ModelError, match=rf"config\.json: {key} = {value!r} is not supported"):
        load_model(make(tmp_path, name, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": False, "mlp_bias": None, "hidden_act": "silu", "is_causal": True, "rope_scaling": None},
        {"hidden_act": "swish", "use_cache": False, "torch_dtype": "float16", "attention_dropout": 0.1},
    ],
)
def test_neutral_values_and_keys_without_effect_change_nothing(tmp_path, changes):
    plain = load_model(make(tmp_path / "plain", "llama3"))
    model = load_model(make(tmp_path, "llama3", **changes))
    assert (model.spec, model.unread_keys) == (plain.spec, ())


@pytest.mark.parametrize("name", TINY)
def test_no_key_that_transformers_writes_is_unread(tmp_path, name):
    assert load_model(make(tmp_path, name)).unread_keys == ()


def test_other_keys_are_listed(tmp_path):
    model = load_model(make(tmp_path, "llama3", zebra=1, auto_map={"AutoModel": "x"}, nothing=None))
    assert model.unread_keys == ("auto_map", "zebra")


GOOD = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_rotary_parameters_are_computed_or_refused(tmp_path, kind):
    good = {"rope_type": kind, "rope_theta": 500.0, **GOOD[kind]}
    spec = load_model(make(tmp_path / "good", "llama3", rope_parameters=good)).spec
    assert load_model(make(tmp_path / "neutral", "llama3", rope_parameters={**good, "finetuned": True})).spec == spec
    for key in ("zebra", "mscale", "beta_fast", "low_freq_factor", "short_factor", "alpha"):
        if key in good or (kind == "yarn" and key in ("mscale", "beta_fast")):
            continue
        with pytest.raises(ModelError, match=rf"rotary parameters of type {kind}: {key} = 3\.5 is not supported"):
            load_model(make(tmp_path / key, "llama3", rope_parameters={**good, key: 3.5}))


def test_dynamic_scaling_is_none_up_to_the_longest_position(tmp_path):
    default = {"rope_type": "default", "rope_theta": 500.0}
    spec = load_model(make(tmp_path / "default", "internlm3", rope_parameters=default)).spec
    old = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}
    dynamic = load_model(make(tmp_path / "dynamic", "internlm3", **old)).spec
    assert (dynamic, dynamic.longest_model_len) == (spec, TINY["internlm3"]["config"]["max_position_embeddings"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5 is not supported",
        ),
        (  # which its reference has no use for, unless the type is proportional
            "lfm3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
                    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0},
                }
            },
            "partial_rotary_factor = 0.5 is not supported",
        ),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling has factor = 2.0, rope_parameters 8.0",
        ),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "full_attention = .* not supported"),
        ("gemma3", {"rope_parameters": {"rope_theta": 500.0}}, r"rope_parameters.rope_theta = 500.0 is not of a type"),
        ("gemma3", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping = 2.0 is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        ("deepseek-v3", {"norm_topk_prob": None}, "norm_topk_prob = None is not supported"),
        ("youtu", {"rope_interleave": None}, "rope_interleave = None is not supported"),
        ("bamba", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported"),
        (
            "olmo3",
            {"rope_parameters": None, "rope_theta": 1e4},
            "rope_theta = 10000.0 is not that of sliding layers in",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling has type = 'linear' without rope_type, which the reference reads",
        ),
        ("falcon-h1-normed", {"mamba_norm_before_gate": None}, "mamba_norm_before_gate = None is not supported"),
        *(
            (
                name,
                {"layer_types": ["full_attention"] * 4, "sliding_window": 3, "use_sliding_window": True},
                r"layer_types = .* is not supported",
            )
            for name in ("mistral", "mixtral", "ministral3", "phi3", "starcoder2", "qwen3-moe")
        ),
    ],
)
def test_what_the_reference_of_a_family_does_not_compute_is_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, name, **changes))


def test_the_rotary_part_of_a_head_may_be_a_number_of_dimensions(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    spec = load_model(
        make(tmp_path / "part", "minimax-m2", rope_parameters={**rope, "partial_rotary_factor": 0.5})
    ).spec
    assert load_model(make(tmp_path / "number", "minimax-m2", rope_parameters=rope, rotary_dim=6)).spec == spec


def test_null_is_what_the_reference_computes_for_it(tmp_path):
    null = load_model(make(tmp_path / "null", "minicpm3", dim_model_base=None, scale_depth=None)).spec
    config = TINY["minicpm3"]["config"]
    written = {"dim_model_base": config["hidden_size"], "scale_depth": config["num_hidden_layers"] ** 0.5}
    assert load_model(make(tmp_path / "written", "minicpm3", **written)).spec == null
    of_heads = Config(Path("config.json"), {**TINY["internlm3"]["config"], "head_dim": None})
    assert FAMILIES["internlm3"].read(of_heads).head_dim == 32 // 4


def test_the_older_form_beside_an_equal_newer_one_changes_nothing(tmp_path):
    newer = TINY["llama3"]["config"]["rope_parameters"]
    plain = load_model(make(tmp_path / "newer", "llama3")).spec
    assert load_model(make(tmp_path / "both", "llama3", rope_scaling=newer)).spec == plain


def test_the_length_beside_the_rotary_parameters_comes_first(tmp_path):
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
    short = {**parameters, "original_max_position_embeddings": 16}
    both = make(tmp_path / "both", "llama3", rope_parameters=parameters, original_max_position_embeddings=16)
    assert load_model(both).spec == load_model(make(tmp_path / "one", "llama3", rope_parameters=short)).spec


def test_a_factor_without_a_type_of_scaling_is_refused(tmp_path):
    parameters = {"rope_type": "default", "rope_theta": 500.0, "factor": 4.0}
    with pytest.raises(ModelError, match=r"factor = 4\.0 is not supported\. Use a model with factor = 1\.0"):
        load_model(make(tmp_path, "llama3", rope_parameters=parameters))


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1 + 0.1 * np.log(4)),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (1 + 0.0707 * np.log(4)) / (1 + 0.05 * np.log(4))),
        ({"mscale": 0.707}, 1 + 0.1 * np.log(4)),
        ({"attention_factor": 1.5, "mscale": 0.707, "mscale_all_dim": 0.5}, 1.5),
    ],
)
def test_yarn_is_scaled_as_by_transformers(tmp_path, changes, scale):
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, **GOOD["yarn"], **changes}
    layer = load_model(make(tmp_path, "llama3", rope_parameters=parameters)).spec.layers[0]
    assert layer.rope.scale == pytest.approx(scale)


def head_of(tmp_path, head):
    """A model with tied embeddings, whose file has a matrix of logits, too; and whether its weights have it."""
    tiny = TINY["llama-linear-tied"]
    tensors = random_tensors(tiny["shapes"])
    folder = write_model(
        tmp_path, tiny["config"], {**tensors, "lm_head.weight": head(tensors["model.embed_tokens.weight"])}
    )
    model = load_model(folder)
    assert model.spec.tie_embeddings == ("lm_head" not in model.weights)
    return model.weights.get("lm_head")


def test_a_matrix_of_logits_that_differs_from_tied_embeddings_is_used(tmp_path):
    def changed(embed):
        return np.where(np.arange(len(embed))[:, None] == len(embed) - 1, embed + 1, embed).astype("<f4")

    assert head_of(tmp_path / "same", lambda embed: embed) is None
    assert head_of(tmp_path / "type", lambda embed: embed.astype("<f2")) is not None
    np.testing.assert_array_equal(
        head_of(tmp_path / "other", changed).dequantize(),
        changed(random_tensors(TINY["llama-linear-tied"]["shapes"])["model.embed_tokens.weight"]),
    )


def as_gguf(tmp_path, name, **more):
    tiny = TINY[name]
    return write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more)


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        ("attention.scale", ("f32", 0.5)),
        ("attention.value_length", ("u32", 4)),
        ("attention.key_length_swa", ("u32", 4)),
        ("expert_weights_scale", ("f32", 2.5)),
        ("expert_gating_func", ("u32", 2)),
        ("logit_scale", ("f32", 0.5)),
        ("rope.dimension_sections", ("[i32]", [1, 1, 1, 1])),
        ("pooling_type", ("u32", 4)),
    ],
)
def test_metadata_that_is_not_computed_is_refused_by_its_name_in_the_file(tmp_path, key, typed):
    with pytest.raises(ModelError, match=rf"model\.gguf: (llama\.)?{key} = .* is not supported"):
        load_model(as_gguf(tmp_path, "llama-linear-tied", **{f"llama.{key}": typed}))


def test_a_file_whose_tokens_see_the_whole_text_has_no_logits_and_a_sliding_window_is_refused(tmp_path):
    causal = {"llama.attention.causal": ("bool", False)}
    spec = load_model(as_gguf(tmp_path, "llama-linear-tied", **causal)).spec
    assert (spec.is_causal, spec.has_logits) == (False, False)
    with pytest.raises(ModelError, match="is_causal = False is not supported with a sliding window"):
        load_model(make(tmp_path, "qwen2-sliding", is_causal=False))


@pytest.mark.parametrize("key", ["alpha", "zebra", "yarn_log_multiplier", "attn_factor"])
def test_metadata_of_rotary_scaling_is_computed_or_refused(tmp_path, key):
    more = {f"llama.rope.scaling.{name}": typed for name, typed in (("factor", ("f32", 2.0)), (key, ("f32", 3.5)))}
    with pytest.raises(
        ModelError, match=rf"model\.gguf: rotary parameters of type linear: {key} = 3\.5 is not supported"
    ):
        load_model(as_gguf(tmp_path, "llama-linear-tied", **more))


@pytest.mark.parametrize("more", [{}, {"llama.rope.scaling.type": ("str", "none")}])
def test_a_factor_of_attention_without_scaling_is_refused(tmp_path, more):
    more = {**more, "llama.rope.scaling.attn_factor": ("f32", 1.5)}
    with pytest.raises(ModelError, match=r"rotary parameters of type default: attn_factor = 1\.5 is not supported"):
        load_model(as_gguf(tmp_path, "llama-linear-tied", **more))


def test_a_factor_of_the_type_none_has_no_use(tmp_path):
    more = {"llama.rope.scaling.type": ("str", "none"), "llama.rope.scaling.factor": ("f32", 4.0)}
    plain = load_model(as_gguf(tmp_path, "llama-linear-tied")).spec
    assert load_model(as_gguf(tmp_path, "llama-linear-tied", **more)).spec == plain


def test_metadata_without_effect_is_accepted_and_other_metadata_listed(tmp_path):
    more = {"llama.attention.causal": ("bool", True), "llama.vocab_size": ("u32", 48), "llama.zebra": ("u32", 1),
            "llama.attention.value_length": ("u32", 10), "llama.rope.scaling.finetuned": ("bool", True),
            "general.zebra": ("u32", 1)}  # fmt: skip
    assert load_model(as_gguf(tmp_path, "llama-linear-tied", **more)).unread_keys == ("llama.zebra",)


@pytest.mark.parametrize("typed", [("u32", 49), ("str", "48"), ("[i32]", [48])])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path, typed):
    with pytest.raises(ModelError, match=r"llama\.vocab_size = .*, token_embd\.weight has 48 rows"):
        load_model(as_gguf(tmp_path, "llama-linear-tied", **{"llama.vocab_size": typed}))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(tmp_path, key):
    typed = load_model(
        as_gguf(
            tmp_path,
            "llama-yarn",
            **{"llama.rope.scaling.type": ("str", "linear"), "llama.rope.scaling.factor": ("f32", 4.0)},
        )
    ).spec
    assert load_model(as_gguf(tmp_path, "llama-yarn", **{f"llama.{key}": ("f32", 4.0)})).spec == typed
    plain = load_model(as_gguf(tmp_path, "llama-yarn")).spec
    assert plain.layers[0].rope.inv_freq[1] == pytest.approx(4 * typed.layers[0].rope.inv_freq[1])


def test_the_factor_of_attention_multiplies_that_of_yarn(tmp_path):
    more = {"llama.rope.scaling.type": ("str", "yarn"), "llama.rope.scaling.factor": ("f32", 4.0),
            "llama.rope.scaling.attn_factor": ("f32", 0.5)}  # fmt: skip
    layer = load_model(as_gguf(tmp_path, "llama-yarn", **more)).spec.layers[0]
    assert layer.rope.scale == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))


def test_a_gguf_file_without_epsilon_is_refused():
    values = plain(metadata(TINY["qwen2"]["config"]))
    del values["qwen2.attention.layer_norm_rms_epsilon"]
    config = config_from_gguf(GGUF(PATH, 3, values, {}), FAMILIES["qwen2"].keys)
    config = replace(config, values={**config.values, "vocab_size": 48})
    with pytest.raises(ModelError, match=r"qwen2\.attention\.layer_norm_rms_epsilon is missing"):
        FAMILIES["qwen2"].read(config)


def test_the_pooling_of_a_gguf_file_is_followed(tmp_path):
    assert load_model(as_gguf(tmp_path, "qwen3", **{"qwen3.pooling_type": ("u32", 1)})).pooling.pooling == "mean"
    assert load_model(as_gguf(tmp_path, "qwen3")).pooling.pooling == "last"


def test_a_key_that_is_not_declared_cannot_be_read():
    config = Config(PATH, {"a": 1}, keys=table([Key("a"), only("b", True)]))
    assert (config.value("a"), config.value("b"), config.read) == (1, True, {"a", "b"})
    with pytest.raises(KeyError):
        config.value("c")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("minicpm", "*.residual_scale", 3.0),
        ("qwen3_5", "*.rope.dimension_sections", [4, 2, 2]),
        ("deepseek-v3", "*.expert_gating_func", 1),
        ("llama3", "*.attention.scale", 0.5),
    ],
)
def test_a_key_of_gguf_files_has_no_influence_in_a_directory(tmp_path, name, key, value):
    want, model = load_model(make(tmp_path / "a", name)), load_model(make(tmp_path / "b", name, **{key: value}))
    assert model.spec == want.spec
    assert (want.unread_keys, model.unread_keys) == ((), (key,))
