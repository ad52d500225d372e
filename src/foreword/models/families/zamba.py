"""Zamba 2: Mamba 2 layers, before some of which one of a few blocks of attention and an MLP runs, whose weights the
layers have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, HIDDEN_ACT, Family, Rows, decoder, num_layers, rope
from foreword.models.families.mamba import MAMBA, fused_mamba, mamba2
from foreword.models.families.states import check_state, state_names
from foreword.models.keys import Key, only, table
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import AsideSpec, DecoderSpec, LayerSpec, RopeSpec, block_of


def zamba2(config: Config) -> DecoderSpec:
    """Return a spec with two layers for each one that is "hybrid": the block aside, and Mamba 2."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    dim = config.size("head_dim", max(1, 2 * hidden // heads), most=1 << 16)
    own = config.with_values({"head_dim": dim})
    rank = config.size("adapter_rank", most=1 << 16)
    aside = AsideSpec(0, rank if config.get("use_shared_attention_adapter", bool) else 0, rank)
    recurrent = replace(mamba2(config), least_step=config.get("time_step_min", float), norm_eps=1e-5)
    rotary = rope(own) if config.get("use_mem_rope", bool) else None
    return decoder(
        own,
        "zamba2",
        _layers(config, recurrent, aside, rotary),
        intermediate_size=config.size("intermediate_size", 4 * hidden),
        query_scale=(dim / 2) ** -0.5,
        max_model_len=config.size("max_position_embeddings"),
    )


def _layers(
    config: Config, recurrent: RecurrentSpec, aside: AsideSpec, rotary: RopeSpec | None
) -> tuple[LayerSpec, ...]:
    """Return the layers, of which the n-th one aside has the block n mod ``num_mem_blocks``."""
    check_state(config, recurrent)
    kinds, count = _kinds(config), config.size("num_mem_blocks")
    hybrid = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    if config.value("hybrid_layer_ids") not in (None, hybrid):
        raise config.refused("hybrid_layer_ids", config.value("hybrid_layer_ids"))
    width = 2 * config.size("hidden_size")
    if config.optional("attention_hidden_size", int) not in (None, width):
        raise config.refused("attention_hidden_size", config.value("attention_hidden_size"))
    state = LayerSpec(None, recurrent=recurrent, has_mlp=False)
    layers: list[LayerSpec] = []
    for i in range(len(kinds)):
        if i in hybrid:
            block = hybrid.index(i) % count
            layers.append(LayerSpec(rotary, aside=replace(aside, block=block)))
        layers.append(state)
    return tuple(layers)


def _kinds(config: Config) -> Sequence[str]:
    """Return the kind of each layer of a file."""
    kinds, count = config.sequence("layers_block_type"), num_layers(config)
    if config.value("layers_block_type") is None:
        kinds = _USUAL
    if len(kinds) != count or not all(kind in _KINDS for kind in kinds):
        reason = f"layers_block_type {kinds!r:.80} is not {count} of {' and '.join(_KINDS)}"
        raise config.error(reason, USE_ITS_CONFIG)
    return kinds


def _numbers(spec: DecoderSpec) -> list[int]:
    """Return the number of each layer in a file, where a layer aside is a part of the one after it."""
    numbers: list[int] = []
    for layer in spec.layers:
        before = spec.layers[len(numbers) - 1] if numbers else layer
        numbers.append(0 if not numbers else numbers[-1] + (before.aside is None))
    return numbers


def _places(spec: DecoderSpec) -> Iterator[tuple[int, AsideSpec, str, str]]:
    """Yield each layer aside, and the beginnings of the names of its own tensors and of those of its block."""
    numbers, first = _numbers(spec), dict[int, int]()
    for i, layer in enumerate(spec.layers):
        if layer.aside is not None:
            own = f"model.layers.{numbers[i]}."
            of_block = first.setdefault(layer.aside.block, numbers[i])
            yield i, layer.aside, own, f"model.layers.{of_block}.{_BLOCK}"


def _fused(spec: DecoderSpec) -> Mapping[str, str | Rows]:
    """Return the rows of in_proj, and the tensors of the blocks and of the layers aside. The block has what is added to
    its products of low rank, one for each layer aside of the model.
    """
    names = dict[str, str | Rows](fused_mamba(spec))
    for n, (i, aside, own, file) in enumerate(_places(spec)):
        block, p = block_of(aside), f"layers.{i}."
        names |= _linear(spec, n, block, p, file)
        names |= {block + name: f"{file}{module}.weight" for name, module in _NORMS.items()}
        names[p + "aside"] = own + "linear.weight"
    return names


def _linear(spec: DecoderSpec, n: int, block: str, layer: str, file: str) -> dict[str, str | Rows]:
    """Return the tensors of the linear layers of a block, whose names begin with ``file``, and of the products of low
    rank that it has for the n-th layer aside. block, layer: the beginnings of the canonical names of both.
    """
    inner, names = spec.intermediate_size, dict[str, str | Rows]()

    def both(prefix: str, tensor: str, end: str = "") -> dict[str, str | Rows]:
        name = f"{prefix}gate_up{end}"
        return {
            name: tensor,
            f"{prefix}gate{end}": Rows(name, 0, inner),
            f"{prefix}up{end}": Rows(name, inner, 2 * inner),
        }

    mlp = file + "feed_forward."
    names |= {block + name: f"{file}self_attn.{name}_proj.weight" for name in "qkvo"}
    names |= {block + "down": mlp + "down_proj.weight", **both(block, mlp + "gate_up_proj.weight")}
    for name in "qkv":
        low, high = (f"{module}.weight" for module in _low_rank(file, name, n))
        names |= {f"{layer}{name}_low": low, f"{layer}{name}_high": high}
    low, high = (f"{module}.weight" for module in _low_rank(file, "mlp", n))
    return names | {layer + "mlp_low": low, **both(layer, high, "_high")}


def _low_rank(file: str, name: str, n: int) -> tuple[str, str]:
    """Return the two modules of a product of low rank that a block has for the n-th layer aside."""
    module = "feed_forward.gate_up_proj" if name == "mlp" else f"self_attn.linear_{name}"
    return f"{file}{module}_adapter_list.{n}.0", f"{file}{module}_adapter_list.{n}.1"


def _changed(spec: DecoderSpec) -> Mapping[str, str | Rows]:
    """Return the linear layers of blocks by layer: each layer has modules of its own, with the weights of others."""
    names = dict[str, str | Rows]()
    for n, (i, _, own, _) in enumerate(_places(spec)):
        names |= _linear(spec, n, f"layers.{i}.", f"layers.{i}.", own + _BLOCK)
    return names


def _idle(spec: DecoderSpec) -> Mapping[str, str]:
    """Return the products of low rank that a layer has for others with its block, with those of these layers."""
    found, places = dict[str, str](), [(aside, own + _BLOCK) for _, aside, own, _ in _places(spec)]
    for aside, own in places:
        for n, (other, user) in enumerate(places):
            if user == own or other.block != aside.block:
                continue
            for name in (*("qkv" if aside.attention_rank else ""), *(["mlp"] if aside.mlp_rank else [])):
                found |= dict(zip(_low_rank(own, name, n), _low_rank(user, name, n), strict=True))
    return found


def _tied(spec: DecoderSpec) -> dict[str, str]:
    """Return the beginnings of the names of the other copies of blocks."""
    return {own + _BLOCK: file for _, _, own, file in _places(spec) if own + _BLOCK != file}


_BLOCK = "shared_transformer."
_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
_KINDS = ("mamba", "linear_attention", "hybrid")
_STATE = "linear_attention"
_USUAL = [_STATE, *([_STATE] * 5 + ["hybrid"]) * 7, *[_STATE] * 4, "hybrid", *[_STATE] * 3, "hybrid", *[_STATE] * 2]
_OWN_NAMES = {
    "mamba_n_heads": "n_mamba_heads",
    "mamba_d_head": "mamba_headdim",
    "mamba_n_groups": "mamba_ngroups",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "add_bias_linear",
}
_KEYS = (
    *(*DECODER, HIDDEN_ACT),
    *(replace(key, own=_OWN_NAMES.get(key.name, "")) for key in MAMBA if key.name != "time_step_limit"),
    replace(only("mamba_conv_bias", True), own="use_conv_bias"),
    replace(only("mamba_proj_bias", False), own="add_bias_linear"),
    Key("head_dim", own="attention_head_dim", is_alias=True, kind=int),
    *(Key("layers_block_type"), Key("hybrid_layer_ids"), Key("attention_hidden_size", kind=int)),
    *(Key("num_mem_blocks", 1), Key("adapter_rank", 128), Key("time_step_min", 0.001)),
    *(Key("use_shared_attention_adapter", False), Key("use_mem_rope", False), only("use_long_context", False)),
)
_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32,
    "max_position_embeddings": 4096, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "mamba_n_heads": 8, "mamba_d_state": 64,
}  # fmt: skip
FAMILIES = {
    "zamba2": Family(
        "Zamba 2: Mamba 2 layers, and blocks of attention that layers share",
        zamba2,
        table(_KEYS, **_DEFAULTS),
        aliases={"layer_types": "layers_block_type"},
        names={**state_names("mamba"), "final_norm": "model.final_layernorm.weight"},
        renamed={".mamba_decoder.": "."},
        fused=_fused,
        numbers=_numbers,
        tied=_tied,
        changed=_changed,
        idle=_idle,
    )
}
