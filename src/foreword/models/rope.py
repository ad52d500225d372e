"""Rotary frequencies: each supported scaling rule, computed once into a `RopeSpec`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foreword.arrays import F64
from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.keys import Key, Keys, of_gguf, only, table
from foreword.models.spec import RopeSpec

ROTARY_DIM, _ORIGINAL = "*.rope.dimension_count", "original_max_position_embeddings"
_INTERLEAVED = "mrope_interleaved"
ROPE_KEYS = (
    Key("rope_theta", 10000.0, gguf="rope.freq_base", gguf_default=10000.0),
    Key("rope_scaling"),
    Key("rope_parameters"),
    only("partial_rotary_factor", 1.0),
    of_gguf(ROTARY_DIM),
    Key(_ORIGINAL, kind=int),
)
"""Keys of a config that has a rotary embedding."""
PARTIAL_ROTARY = Key("partial_rotary_factor", 1.0)
"""The keys of a family that rotates a part of each head."""
ROTARY_SECTIONS = Key("*.rope.dimension_sections", gguf="rope.dimension_sections", kind=list)
"""The key of a family whose rotary positions may have several components, see `with_sections`."""

_SHARED = (
    *(Key(name, kind=str) for name in ("rope_type", "type")),
    *(Key(name, kind=float) for name in ("rope_theta", "partial_rotary_factor")),
    *(Key("mrope_section", kind=list), Key(_INTERLEAVED, kind=bool)),
    Key(_ORIGINAL, kind=int),  # other types have no use for it
    Key("finetuned", kind=bool),  # tells how the model was trained
    *(only(name, 1.0) for name in ("factor", "linear_factor", "attention_factor", "attn_factor", "yarn_attn_factor")),
    only("yarn_ext_factor", 1.0),
    only("yarn_log_multiplier", 0.0),
)


_LISTS = ("divisors", "short_factor", "long_factor")


def _type(*names: str) -> Keys:
    kinds = {"truncate": bool, **dict.fromkeys(_LISTS, list)}
    return table(_SHARED, (Key(name, kind=kinds.get(name, float)) for name in names))


ROPE_TYPES: Mapping[str, Keys] = {
    "default": _type(),
    "mrope": _type(),
    "linear": _type("factor"),
    "dynamic": _type("factor"),
    "divided": _type("divisors"),
    "proportional": _type("factor"),
    "llama3": _type("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": _type(
        *("factor", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "attn_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": _type(*("factor", "short_factor", "long_factor"), *("attention_factor", "short_mscale", "long_mscale")),
}
"""Keys of the rotary parameters by ``rope_type``. Every other key is refused."""


def rope_spec(config: Config, head_dim: int, parameters: Mapping[str, Any]) -> RopeSpec:
    """Return the rotary embedding that ``parameters`` (rope_type, rope_theta and the values of the type) describe.

    With base frequency f_j = theta^(−2j/d) for d = head_dim * partial_rotary_factor, or what a GGUF file has for it:

        default   f_j
        linear    f_j / factor
        dynamic   f_j, since factor changes those of positions beyond max_position_embeddings alone
        divided   f_j / divisors_j
        proportional  f_j / factor, with d = head_dim, for j < d * partial_rotary_factor / 2, and 0 for the other pairs
        llama3    f_j where the wavelength 2π/f_j is short (< original/high), f_j / factor where it is long
                  (> original/low), in between, if low < high, interpolated by the number of waves in that length
        yarn      f_j for dimensions with more than beta_fast rotations in the original length, f_j / factor for those
                  with fewer than beta_slow, a linear ramp between; scaled by attention_factor, or by m(mscale) /
                  m(mscale_all_dim) if both are set, or by m(1) attn_factor, with m(x) = 0.1 x ln(factor) + 1
        longrope  f_j / long_factor_j if requests of more than ``original`` tokens are served, else f_j / short_factor_j

    With mrope_section (a number of pairs per component of a position; type "mrope" of Qwen2-VL is default) each pair is
    rotated by one component, see `_mrope_axes`.

    longrope is scaled by sqrt(1 + ln(factor) / ln(original)), where factor = max_position_embeddings / original unless
    it is given; or by attention_factor; or by long_mscale and short_mscale. Its frequencies depend on the longest
    request the engine accepts, not on each request: otherwise cached keys would have to be rotated again as it grows.
    """
    kind = Config(config.path, parameters).get("rope_type", str, "default")
    if kind not in ROPE_TYPES:
        fix = "Use a model with default, linear, dynamic, llama3, yarn, longrope or proportional"
        raise config.error(f"rope_type {kind!r} is not supported", fix)
    rules = Config(config.path, parameters, keys=ROPE_TYPES[kind], part=f"rotary parameters of type {kind}: ")
    rules.check(strict=True)
    of_model = config.get("partial_rotary_factor", float)
    part = rules.get("partial_rotary_factor", float, of_model)
    is_proportional = kind == "proportional"  # then the part is of all pairs, which are those of the whole head
    if not is_proportional:
        config.check_computed("partial_rotary_factor", part)
    for one in (of_model, part):
        if not 0 < one <= 1:
            raise config.error(f"partial_rotary_factor = {one} is not above 0 and at most 1", USE_ITS_CONFIG)
    is_whole = is_proportional or bool(config.prefix)  # GGUF files have the number of dimensions if it is a part
    dim = config.get(ROTARY_DIM, int, head_dim if is_whole else int(head_dim * part))
    if not 0 < dim <= head_dim or dim % 2:
        reason = f"the rotary part of a head has {dim} dimensions, not an even number above 0"
        raise config.error(reason, USE_ITS_CONFIG)
    theta = rules.positive("rope_theta")
    base = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    scale = 1.0
    match kind:
        case "default" | "mrope":
            scaled = base
        case "dynamic":
            rules.positive("factor")
            scaled = base
        case "linear":
            scaled = base / rules.positive("factor")
        case "proportional":
            scaled = np.where(np.arange(dim // 2) < int(part * dim // 2), base / rules.positive("factor", 1.0), 0.0)
        case "divided":
            scaled = base / _vector(rules, "divisors", len(base))
        case "llama3":
            scaled = _llama3(base, rules, config)
        case "yarn":
            scaled, scale = _yarn(base, dim, theta, rules, config)
        case "longrope":
            scaled, scale = _longrope(base, rules, config)
    return RopeSpec(tuple(float(np.float32(f)) for f in scaled), scale, _mrope_axes(rules, config, dim // 2))


def _mrope_axes(rules: Config, config: Config, num_pairs: int) -> tuple[int, ...]:
    """Return the component of a position that rotates each pair; () without ``mrope_section``.

    With sections s_0 … s_n−1: the first s_0 pairs by component 0, the next s_1 by component 1, and so on. With
    mrope_interleaved: pair j by component j mod n if it is among the first s_{j mod n} such pairs, else by component 0;
    these sections of a config.json may add up to any number, as in a small model with those of a large one.
    """
    sections = rules.sequence("mrope_section")
    if not sections:
        if rules.get("rope_type", str, "default") == "mrope":
            raise rules.error("rope_type 'mrope' has no mrope_section", USE_ITS_CONFIG)
        return ()
    are_counts, is_interleaved = all(type(s) is int and s >= 0 for s in sections), rules.get(_INTERLEAVED, bool, False)
    may_differ = is_interleaved and not config.prefix
    if not are_counts or (sum(sections) != num_pairs and not may_differ):
        raise rules.error(f"mrope_section {sections!r:.80} does not add up to {num_pairs} pairs", USE_ITS_CONFIG)
    if is_interleaved:
        turns = [divmod(j, len(sections)) for j in range(num_pairs)]
        return tuple(axis if turn < sections[axis] else 0 for turn, axis in turns)
    return tuple(axis for axis, size in enumerate(sections) for _ in range(size))


def with_sections(config: Config, *, interleaved: bool) -> Config:
    """Return the config with ``mrope_section`` among its rotary parameters as `rope_spec` reads it.

    GGUF files have the sections beside the parameters, filled up with zeros. interleaved: the family interleaves them
    unless the parameters say that it does not; GGUF files never say it.
    """
    values = dict(config.values)
    if config.value(ROTARY_SECTIONS.name) is not None:
        sizes = config.sequence(ROTARY_SECTIONS.name)
        if not sizes or not all(type(size) is int and size >= 0 for size in sizes):
            reason = f"{config.label(ROTARY_SECTIONS.name)} {sizes!r:.80} are not numbers of pairs"
            raise config.error(reason, USE_ITS_CONFIG)
        count = max((i + 1 for i, size in enumerate(sizes) if size), default=0)
        values["rope_scaling"] = {**(config.value("rope_scaling") or {}), "mrope_section": list(sizes[:count])}
    for key in ("rope_parameters", "rope_scaling") if interleaved else ():
        rules = values.get(key)
        if isinstance(rules, Mapping) and rules.get("mrope_section"):
            values[key] = {_INTERLEAVED: True, **rules}
    return replace(config, values=values)


def with_usual_sections(config: Config, sections: Sequence[int]) -> Config:
    """Return the config with these sections as ``mrope_section`` of rotary parameters that have none."""
    if not sections:
        return config
    names = [name for name in ("rope_parameters", "rope_scaling") if isinstance(config.value(name), Mapping)]
    usual = {name: {"mrope_section": list(sections), **config.value(name)} for name in names}
    return config.with_values(usual or {"rope_parameters": {"mrope_section": list(sections)}})


def _llama3(base: F64, rules: Config, config: Config) -> F64:
    low, high = rules.positive("low_freq_factor"), rules.positive("high_freq_factor")
    if low > high:
        raise rules.error(f"low_freq_factor {low} is above high_freq_factor {high}", USE_ITS_CONFIG)
    waves = _original_length(rules, config) * base / (2 * math.pi)
    kept = np.clip((waves - low) / (high - low), 0, 1) if low < high else (waves > low).astype(np.float64)
    return np.asarray(kept * base + (1 - kept) * base / rules.positive("factor"))


def _yarn(base: F64, dim: int, theta: float, rules: Config, config: Config) -> tuple[F64, float]:
    factor = rules.positive("factor")
    original = _original_length(rules, config)
    if theta <= 1:
        raise rules.error(f"rope_theta = {theta} is not above 1", USE_ITS_CONFIG)

    def turns(count: float) -> float:
        """Return the dimension with ``count`` rotations within the original length."""
        return dim * (math.log(original / (2 * math.pi)) - math.log(count)) / (2 * math.log(theta))

    low, high = turns(rules.positive("beta_fast", 32.0)), turns(rules.positive("beta_slow", 1.0))
    if rules.get("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Where high is below low, since the original length is below one wave, llama.cpp scales all but the first frequency
    # and transformers none.
    width = max(high - low, 0.001) if config.prefix else (high - low) or 0.001
    slow = np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return np.asarray((1 - slow) * base + slow * base / factor), _yarn_scale(factor, rules)


def _yarn_scale(factor: float, rules: Config) -> float:
    """Return the factor of cos and sin."""
    if rules.value("attention_factor") is not None:
        return rules.positive("attention_factor")
    log = max(0.0, math.log(factor)) / 10
    one, all_dims = (rules.get(key, float, 0.0) for key in ("mscale", "mscale_all_dim"))
    if one and all_dims:
        return (1 + one * log) / (1 + all_dims * log)
    return (1 + log) * rules.positive("attn_factor", 1.0)


def _longrope(base: F64, rules: Config, config: Config) -> tuple[F64, float]:
    original = _original_length(rules, config)
    side = "long" if (config.served_length or 0) > original else "short"
    scaled = base / _vector(rules, f"{side}_factor", len(base))
    for key in (f"{side}_mscale", "attention_factor"):
        if rules.value(key) is not None:
            return scaled, rules.positive(key)
    factor = rules.positive("factor", config.size("max_position_embeddings") / original)
    return scaled, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


def _original_length(rules: Config, config: Config) -> int:
    """Return the context length of a model before its extension. That beside the rotary parameters comes first."""
    if config.value(_ORIGINAL) is not None:
        return config.size(_ORIGINAL)
    return rules.size(_ORIGINAL, config.size("max_position_embeddings"))


def model_length(config: Config) -> int:
    """Return the largest number of tokens of a request: max_position_embeddings; with longrope the original length if
    that suffices. Raise ModelError if types of layers have longrope with different original lengths.
    """
    longest, kinds = config.size("max_position_embeddings"), _mapping(config, "rope_parameters").keys() & _KINDS.keys()
    rules = [rope_parameters(config, kind) for kind in kinds or ("",)]
    longropes = (Config(config.path, one) for one in rules if one.get("rope_type") == "longrope")
    originals = {min(longest, _original_length(one, config)) for one in longropes} or {longest}
    if len(originals) > 1:
        reason = f"types of layers have longrope with {_ORIGINAL} = {sorted(originals)}"
        raise config.error(reason, "Use a model with one original length")
    [original] = originals
    return longest if (config.served_length or 0) > original else original


def _vector(rules: Config, key: str, length: int) -> F64:
    values = rules.sequence(key)
    if len(values) != length or not all(type(v) in (int, float) and 0 < v < math.inf for v in values):
        raise rules.error(f"{key} is not {length} numbers above 0", USE_ITS_CONFIG)
    return np.asarray(values, np.float64)


def rope_parameters(config: Config, layer_type: str = "") -> dict[str, Any]:
    """Return the rotary parameters of all layers, or of a type of layers where each has its own: ``rope_parameters``,
    or the older pair ``rope_theta`` and ``rope_scaling``, whose ``type`` ``su`` is longrope. Raise ModelError if both
    are given and differ, and for parameters or an original length of all layers, and for a scaling without
    ``rope_type``, where each type has its own.
    """
    found, older = _mapping(config, "rope_parameters"), _mapping(config, "rope_scaling")
    if layer_type:
        kinds = _KINDS[layer_type]
        if other := sorted(found.keys() - set(kinds)):
            reason = f"rope_parameters.{other[0]} = {found[other[0]]!r:.80} is not of a type of layers"
            raise config.error(reason, f"Give {' and '.join(kinds)}, each with its parameters")
        found = _mapping(Config(config.path, found), layer_type)
        if (kind := older.get("type")) not in (None, "default") and older.get("rope_type") is None:
            reason = f"rope_scaling has type = {kind!r:.80} without rope_type, which the reference reads in its place"
            raise config.error(reason, f"Give rope_type = {kind!r:.80}, or rope_parameters of each type of layers")
    if found and older:
        forms = _complete(found, config), _complete(older, config)
        for key in sorted({*forms[0], *forms[1]}):
            if (new := forms[0].get(key)) != (old := forms[1].get(key)):
                reason = f"rope_scaling has {key} = {old!r:.80}, rope_parameters {new!r:.80}"
                raise config.error(reason, USE_ITS_CONFIG)
    made = _complete(found or older, config)
    given, own = config.value(_ORIGINAL), made.get(_ORIGINAL, config.value("max_position_embeddings"))
    if layer_type and made.get("rope_type") in _WITH_ORIGINAL and given not in (None, own):
        reason = f"{_ORIGINAL} = {given!r:.80} has no effect in the reference, which reads that of {layer_type}"
        raise config.error(reason, USE_ITS_CONFIG)
    return made


def check_type(config: Config, *types: str) -> None:
    """Raise ModelError unless the rotary parameters of all layers are of one of these types."""
    kind = rope_parameters(config).get("rope_type", "default")
    if kind not in types:
        raise config.error(f"rope_type {kind!r:.80} is not supported", f"Use a model with {' or '.join(types)}")


def check_bases(config: Config, layer_types: Collection[str]) -> None:
    """Raise ModelError if ``rope_parameters`` lacks the base of a type of layers, where each type has its own."""
    found = _mapping(config, "rope_parameters")
    for one in sorted(layer_types):
        if "rope_theta" not in _mapping(Config(config.path, found), one):
            raise config.error(f"rope_parameters has no rope_theta for {one}", USE_ITS_CONFIG)


def _complete(own: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the parameters with a base, and with ``rope_type`` for the older ``type``. Raise ModelError if they
    differ.
    """
    older, kind = _NAMES_OF_TYPES.get(str(own.get("type")), own.get("type")), own.get("rope_type")
    if None not in (older, kind) and older != kind and (older, kind) != ("mrope", "default"):
        reason = f"rotary parameters have type = {older!r:.80}, rope_type = {kind!r:.80}"
        raise config.error(reason, USE_ITS_CONFIG)
    return {"rope_theta": config.positive("rope_theta"), **({} if older is None else {"rope_type": older}), **own}


_NAMES_OF_TYPES = {"su": "longrope"}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
_KINDS = {
    kind: kinds for kinds in (("full_attention", "sliding_attention"), ("hybrid", "hybrid_sliding")) for kind in kinds
}
"""The names of the types of layers of a model, by each of them."""


def _mapping(config: Config, key: str) -> Mapping[str, Any]:
    value = {} if config.value(key) is None else config.value(key)
    if not isinstance(value, Mapping):
        raise config.error(f"{key} is {value!r:.80}, not an object", USE_ITS_CONFIG)
    return value
