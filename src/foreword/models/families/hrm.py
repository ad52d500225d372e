"""HRM-Text: two stacks of layers that run several times for a token, and a residual stream of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, WITH_BIASES, Family, Rows, decoder, num_layers, rope
from foreword.models.keys import Key, table
from foreword.models.spec import DecoderSpec, LayerSpec


def hrm_text(config: Config) -> DecoderSpec:
    """Return a spec with a layer for each run of one: in each high cycle, the low stack runs in each low cycle, and the
    high stack once after these.
    """
    heads, low_cycles = config.size("num_attention_heads"), config.size("L_cycles", most=_MOST)
    runs = ([_LOW] * low_cycles + [_HIGH]) * config.size("H_cycles", most=_MOST)
    if config.size("num_key_value_heads", heads) != heads:
        raise config.refused("num_key_value_heads", config.value("num_key_value_heads"))
    count, first = _layers_of_a_stack(config, len(runs)), {stream: runs.index(stream) for stream in (_LOW, _HIGH)}
    plain, layers = LayerSpec(rope(config)), list[LayerSpec]()
    for run, stream in enumerate(runs):
        for i in range(count):
            of = None if run == first[stream] else first[stream] * count + i
            layers.append(replace(plain, weights_of=of, stream=None if i else stream))
    scale = config.optional("embedding_scale", float)
    return decoder(
        config,
        "hrm_text",
        tuple(layers),
        num_kv_heads=heads,
        attn_gate=True,
        prefix_lm=config.get("prefix_lm", bool),
        embedding_scale=1 / config.positive("initializer_range") if scale is None else scale,
    )


def _layers_of_a_stack(config: Config, num_runs: int) -> int:
    """Return the number of layers of a stack. Older files have it under the name of that of the layers of all runs."""
    given, name = num_layers(config), "num_layers_per_stack"
    count = given if config.value(name) is None else config.size(name, most=_MOST)
    total = count * num_runs
    if total > _MOST:
        raise config.error(f"{num_runs} runs of {count} layers are more than {_MOST}", USE_ITS_CONFIG)
    if config.value(name) is not None and given != total:
        reason = f"num_hidden_layers = {given} is not {num_runs} runs of {name} = {count}"
        raise config.error(reason, USE_ITS_CONFIG)
    return count


def _stacks(spec: DecoderSpec) -> list[tuple[str, str]]:
    """Return the beginnings of the names of the weights of each layer with weights of its own, in the spec and in a
    file.
    """
    own = [i for i, layer in enumerate(spec.layers) if layer.weights_of is None]
    count = len(own) // 2
    return [(f"layers.{i}.", f"model.{'LH'[n // count]}_module.layers.{n % count}.") for n, i in enumerate(own)]


def _fused(spec: DecoderSpec) -> Mapping[str, str | Rows]:
    """Return the names of tensors, which hold gates of attention, queries, keys and values in one, and gate and up."""
    names, size, inner = dict[str, str | Rows](), spec.num_heads * spec.head_dim, spec.intermediate_size
    for p, file in _stacks(spec):
        attention, mlp = p + "gqkv", p + "gate_up"
        names |= {attention: file + _ATTENTION, mlp: file + _MLP, p + "o": file + "attn.o_proj.weight"}
        names |= {p + part: Rows(attention, i * size, (i + 1) * size) for i, part in enumerate(_GQKV)}
        names |= {p + part: Rows(mlp, i * inner, (i + 1) * inner) for i, part in enumerate(("gate", "up"))}
        names[p + "down"] = file + "mlp.down_proj.weight"
        names |= {f"{p}{part}_bias": f"{file}{module}.bias" for part, module in _MODULES.items()}
        names[p + "o_bias"] = file + "attn.o_proj.bias"
    return names


def _changed(spec: DecoderSpec) -> Mapping[str, str | Rows]:
    """Return the names of modules, which have matrices of their own."""
    return {p + part: f"{file}{name}.weight" for p, file in _stacks(spec) for part, name in _MODULES.items()}


_LOW, _HIGH = 0, 1
_MOST = 4096
_GQKV = {part: f"self_attn.{name}_proj" for part, name in (("attn_gate", "gate"), ("q", "q"), ("k", "k"), ("v", "v"))}
_MODULES = {**_GQKV, "o": "self_attn.o_proj", **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}}
_ATTENTION, _MLP = "attn.gqkv_proj.weight", "mlp.gate_up_proj.weight"
FAMILIES = {
    "hrm_text": Family(
        "HRM-Text: two stacks of layers that run several times for a token",
        hrm_text,
        table(
            *(DECODER, WITH_BIASES, [HIDDEN_ACT, Key("H_cycles", 2), Key("L_cycles", 3)]),
            [Key("num_layers_per_stack", kind=int), Key("embedding_scale", kind=float)],
            [Key("initializer_range", 0.02), Key("prefix_lm", True)],
            num_hidden_layers=16,
            head_dim=128,
        ),
        names={"stream_begin": "model.z_L_init"},
        renamed={".self_attn.o_proj.": ".attn.o_proj."},
        joined={
            f".{_ATTENTION}": tuple(f".{name}.weight" for name in _GQKV.values()),
            f".{_MLP}": tuple(f".{_MODULES[name]}.weight" for name in ("gate", "up")),
        },
        constants=dict.fromkeys(("attn_norm", "mlp_norm", "final_norm"), 1.0),
        fused=_fused,
        changed=_changed,
    )
}
