"""Arguments that do not fit are refused by every function of the native kernels, and harm nothing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from kernel_driver import Driver, step_of
from kernel_reference import SPECS, random_weights, rope

from foreword import _native
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.models.spec import LayerSpec

REFUSED = (ValueError, TypeError, MemoryError)
SPEC = replace(SPECS["llama"], layers=(LayerSpec(replace(rope(16), axes=(0, 1) * 4)), LayerSpec(rope(16))))
WEIGHTS = random_weights(SPEC)
MODEL = {
    "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16, "vocab_size": 50,
    "norm_eps": 1e-5, "query_scale": 0.25, "embedding_scale": 1.0, "activation": "silu", "attn_softcap": 0.0,
    "final_softcap": 0.0,
    "num_groups": 1, "num_slots": 1, "num_blocks": 8, "block_size": 16, "kv_format": "fp32", "isa": "",
    "num_threads": 1,
}  # fmt: skip


def odd_array(rng, array):
    """The array with another dtype, shape, order of memory or values; now and then unchanged."""
    match rng.integers(9):
        case 0:
            return array.astype(rng.choice(["f8", "i1", "u2", "c8", "?", "O", "U4"]))
        case 1:
            return array[..., :0] if rng.random() < 0.5 else array[: len(array) // 2]
        case 2:
            return np.stack([array, array])
        case 3:
            return np.repeat(array, 2, axis=-1)[..., ::2]  # not contiguous
        case 4:
            return rng.choice(np.array([None, 3, "x", [1, 2]], object))
        case 5 | 6 if array.size and array.dtype.kind in "iu":
            array = array.copy()
            limits = np.iinfo(array.dtype)
            wrong = [limits.min, -1, -2, 0, 1, 2**20, limits.max]
            array.flat[rng.integers(array.size)] = min(int(rng.choice(wrong)), limits.max)
            return array
        case _:
            return array


def odd_number(rng, value, most=2**40):
    """Another number of at most ``most``, or no number; now and then unchanged."""
    others = (0, -1, 1, 3, 17, 2**12, 2**20, 2**31 - 1, -(2**31), 2**40, 1.5, None)
    other = others[rng.integers(len(others))]
    return value if rng.random() < 0.5 or (other is not None and other > most) else other


def calls(count, call):
    """``call(rng)`` for many seeds; how many were accepted."""
    accepted = 0
    for seed in range(count):
        try:
            call(np.random.default_rng(seed))
            accepted += 1
        except REFUSED:
            pass
    return accepted


@pytest.fixture
def driver():
    return Driver(SPEC, WEIGHTS, num_blocks=12, max_num_reqs=4)


def test_steps(driver):
    table = np.zeros((4, 128), np.int32)
    table[:2, :2] = [[1, 2], [3, 4]]
    arguments = {
        "num_tokens": 20,
        "num_reqs": 2,
        "num_logits": 2,
        "input_ids": np.arange(20, dtype=np.int32),
        "positions": np.concatenate([np.arange(17), np.arange(3)]),
        "query_start_loc": np.array([0, 17, 20], np.int32),
        "seq_lens": np.array([17, 3], np.int32),
        "idx_mapping": np.array([0, 1], np.int32),
        "logits_indices": np.array([16, 19]),
        "slot_mapping": [np.concatenate([np.arange(16, 33), np.arange(48, 51)])],
        "block_tables": [table],
        "embed_rows": np.array([0, 5, 19]),
        "embeds": np.ones((3, 96), np.float32),
        "mrope_positions": np.zeros((2, 20), np.int64),
    }
    step = partial(step_of, driver.executor.core)
    want = step(**arguments).copy()

    def call(rng):
        changed = dict(arguments)
        for name in rng.choice(list(arguments), rng.integers(1, 3), replace=False):
            value = changed[name]
            if isinstance(value, list):
                changed[name] = [odd_array(rng, value[0])] * rng.integers(0, 3) if rng.random() < 0.8 else None
            else:
                changed[name] = odd_array(rng, value) if isinstance(value, np.ndarray) else odd_number(rng, value)
        step(**changed)

    assert 0 < calls(3000, call) < 3000
    np.testing.assert_array_equal(step(**arguments), want)


def test_sampled_steps(driver):
    columns = {name: np.full(3, default, dtype) for name, (dtype, default) in COLUMNS.items()}
    columns["temperature"][:2] = 1
    columns["repetition_penalty"][:] = 2
    columns["dry_multiplier"][1:] = 1
    columns["min_tokens"][:] = 9
    tokens = np.random.default_rng(1).integers(0, 300, (3, 12)).astype(np.int32)
    prompt_len, num_tokens = np.array([3, 2, 5], np.int32), np.array([6, 7, 8], np.int32)
    rows = _native.SamplingRows(columns, tokens, prompt_len, num_tokens, 300)
    ids = np.array([3, 7, 9, 250], np.int32)
    rules = [ids, ids, np.ones(4, np.float32), ids[:2], ids, np.array([1, 4], np.int32), ids]
    arguments = [
        np.random.default_rng(0).normal(0, 1, (5, 300)).astype(np.float32),
        np.array([0, 1, 2], np.int32),
        np.array([5, 6, 7], np.int32),
        np.array([0, 1, 3, 5], np.int32),
        np.array([6, 7, 8, 8, 9]),
        np.array([4, 5], np.int32),
        np.ones((3, 12), np.bool_),
        np.array([1, 4], np.int32),
        np.full((2, 10), -1, np.int32),
        np.array([0, 2], np.int32),
    ]
    changed = np.zeros((2, 300), np.float32)
    offsets = np.array([0, 3, 6, 9, 12, 15])
    outputs = [np.zeros((3, 2), np.int32), offsets, np.zeros(15, np.int32), np.zeros(15), np.zeros(15, np.int32)]

    def call(rng):
        def some(values, chance):
            return [odd_array(rng, a) if rng.random() < chance else a for a in values]

        if rng.random() < 0.2:  # any number is a parameter
            numbers = np.array([np.nan, np.inf, -np.inf, -1, 1e-45, 3e38], np.float32)
            columns[rng.choice([n for n in columns if columns[n].dtype.kind == "f"])][:] = rng.choice(numbers, 3)
            columns[rng.choice(["dry_allowed_length", "dry_range", "min_tokens", "top_k"])][:] = rng.choice(
                [-(2**31), -1, 0, 1, 2**31 - 1], 3
            )
        model, changed[:] = rng.choice([None, driver.executor.core]), 0
        if rng.random() < 0.3:
            rows.set(odd_number(rng, 1), *some(rules, 0.1))
        if rng.random() < 0.3:
            rows.change(*some([*arguments, changed], 0.1), model)
        else:
            rows.sample(*some([*arguments, changed, *outputs], 0.07), model)

    assert 0 < calls(3000, call) < 3000


def test_blocks(driver):
    core = driver.executor.core
    ids = np.array([1, 2, 3], np.int32)
    assert 0 < calls(500, lambda rng: core.copy_blocks(odd_array(rng, ids), odd_array(rng, ids))) < 500
    assert 0 < calls(500, lambda rng: core.zero_blocks(odd_array(rng, ids))) < 500


def test_sizes_of_models_and_pools():
    def model(rng):
        changed = {k: odd_number(rng, v) if type(v) is int and rng.random() < 0.2 else v for k, v in MODEL.items()}
        _native.CpuModel(**changed)

    assert 0 < calls(2000, model) < 2000
    sizes = {
        k: MODEL[k]
        for k in ("kv_format", "num_blocks", "block_size", "num_slots", "num_kv_heads", "head_dim", "value_dim")
    }

    def pool(rng):
        size = _native.kv_bytes(**{k: odd_number(rng, v) if type(v) is int else v for k, v in sizes.items()})
        assert size > 0

    assert 0 < calls(2000, pool) < 2000
    recurrent = {
        "kind": 1,
        "num_heads": 4,
        "num_key_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
        "conv_kernel": 4,
        "rank": 0,
        "tiled": 0,
        "channel_decays": 0,
        "heads_kernel": 1,
    }

    def hybrid(rng):
        found = _native.CpuModel(**MODEL, recurrent={k: odd_number(rng, v) for k, v in recurrent.items()})
        found.add_layer({"attn_norm": 0})

    assert calls(500, hybrid) == 0
    large, plain = {"recurrent": recurrent | {"key_dim": 800}, "num_state_slots": 2}, _native.kv_bytes(**sizes)
    state = _native.kv_bytes(**sizes, **large, num_states=1) - plain  # beside the blocks, or in each of them
    assert _native.kv_bytes(**sizes, **large, num_states=5) == plain + 5 * state
    assert _native.kv_bytes(**sizes, **large) == sizes["num_blocks"] * state > plain
    for wrong in ({"num_states": 1}, {"num_states": 2**31, **large}, {"num_slots": 0}):
        with pytest.raises((ValueError, TypeError), match=r"num_states|num_slots|arguments"):
            _native.kv_bytes(**{**sizes, **wrong})
    with pytest.raises(ValueError, match="num_key_heads"):
        _native.kv_bytes(**sizes, recurrent=recurrent | {"num_key_heads": 3})
    for wrong in ({"rank": 3}, {"num_heads": 1, "num_key_heads": 1}):  # a state of mamba1 has a rank, and one head
        with pytest.raises(ValueError, match=r"num_heads of mamba1|rank"):
            _native.kv_bytes(**sizes, recurrent=recurrent | {"kind": 3, **wrong})
    lru = {"kind": 4, "num_heads": 1, "num_key_heads": 1, "key_dim": 1, "value_dim": 12, "rank": 4}
    for wrong in ({"key_dim": 2}, {"value_dim": 10}, {"rank": 0}, {"num_heads": 2}):  # blocks of `rank` values
        with pytest.raises(ValueError, match=r"rg_lru|rank"):
            _native.kv_bytes(**sizes, recurrent=recurrent | lru | wrong)
    mixed = {"kind": 5, "key_dim": 0, "heads_kernel": 2}
    for wrong in (
        {"key_dim": 2},
        {"conv_kernel": 1, "heads_kernel": 1},
        {"heads_kernel": 0},
        {"kind": 1, "key_dim": 8},
    ):
        with pytest.raises(ValueError, match="heads_kernel"):
            _native.kv_bytes(**sizes, recurrent=recurrent | mixed | wrong)
    for wrong in ((0, "", 1), (1, "", 0), (1, "", -1), (1025, "", 1), (1, "mmx", 1)):
        with pytest.raises(ValueError, match=r"num_threads|megabytes|mmx"):
            _native.roofline(*wrong)
    with pytest.raises(ValueError, match="num_heads"):
        _native.CpuModel(**{**MODEL, "num_kv_heads": 3})


def test_weights_and_layers():
    def matrix(model, rows, cols):
        return model.pack(np.zeros((rows, 4 * cols), np.uint8), "F32", cols, "f32", False)

    def build(rng):
        model = _native.CpuModel(**MODEL)

        def odd(value):
            """Each argument is wrong in one call of fifty."""
            if rng.random() > 0.02:
                return value
            return odd_number(rng, value, 2**12) if isinstance(value, int) else odd_array(rng, value)

        sizes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
        layer = {name: matrix(model, *map(odd, size)) for name, size in sizes.items()}
        mlp = tuple(matrix(model, odd(rows), odd(cols)) for rows, cols in ((96, 64), (96, 64), (64, 96)))
        mlp += tuple(model.vector(odd(np.zeros(odd(size) or 0, np.float32))) for size in (96, 96, 64))
        vectors = {"attn_norm": 64, "mlp_norm": 64, "post_attn_norm": 64, "q_norm": 16, "q_bias": 64, "k_bias": 32}
        layer |= {name: model.vector(odd(np.zeros(odd(size) or 0, np.float32))) for name, size in vectors.items()}
        layer |= {
            "rope": model.add_rope([1.0] * (odd(8) or 0), 1.0, [odd(1)] * (odd(8) or 0)),
            "sliding_window": 0,
            "group": 0,
            "slot": 0,
        }
        is_late = rng.random() < 0.3
        if is_late or rng.random() < 0.4:
            layer["mlp"] = mlp
        if is_late or "mlp" not in layer:
            layer["late_moe" if is_late else "moe"] = moe = {
                "router": matrix(model, odd(5 if is_late else 3), 64), "experts": [mlp] * (odd(3) or 0),
                "experts_per_token": 2, "norm_topk": True, "sigmoid": False, "scale": 1.0, "sum_eps": 0.0,
                "num_groups": 1, "groups_per_token": 1,
            }  # fmt: skip
            if is_late:
                moe |= {"identities": 2, "ranks_outputs": 1}
            else:
                moe |= {"shared": mlp, "shared_gate": matrix(model, odd(1), 64)}
            moe |= {key: odd(value) for key, value in moe.items() if isinstance(value, int)}
        layer |= {key: odd(value) for key, value in layer.items() if isinstance(value, int)}
        if rng.random() < 0.1:
            del layer[rng.choice(list(layer))]
        model.set_embedding(np.zeros((odd(50), 256), np.uint8), "F32", odd(64))
        model.add_layer(layer)
        model.finish(odd(model.vector(np.zeros(64, np.float32))), -1, odd(matrix(model, odd(50), 64)))
        slots, table = np.arange(16, 20), np.array([[1]], np.int32)
        counts = [np.array(values, np.int32) for values in ([0, 4], [4], [0])]
        ids = np.arange(4, dtype=np.int32)
        drafts = [np.array(values, np.int32) for values in ([0], [1])]
        inputs = _native.ModelInputs(ids, np.arange(4), *counts, np.array([3]), [slots], [table], *drafts)
        model.step(inputs, 4, 1, 1)

    assert 0 < calls(1500, build) < 1500


@pytest.mark.parametrize(
    ("columns", "row_bytes", "source", "target"),
    [(64, 255, "F32", "f32"), (48, 34, "Q8_0", "q8"), (64, 68, "Q8_0", "q4"), (256, 210, "Q6_K", "q8"),
     (64, 256, "F64", "f32"), (64, 256, "F32", "f64"), (0, 0, "F32", "f32"), (-64, 256, "F32", "f32")],
)  # fmt: skip
def test_weights_that_do_not_fit_their_format(columns, row_bytes, source, target):
    model = _native.CpuModel(**MODEL)
    with pytest.raises(ValueError, match=r"weight|blocks|cols"):
        model.pack(np.zeros((4, row_bytes), np.uint8), source, columns, target, False)


def test_a_model_is_complete_before_it_runs_and_fixed_after(driver):
    model = _native.CpuModel(**MODEL)
    with pytest.raises(ValueError, match="embedding"):
        model.finish(0, -1, 0)
    arrays = [np.zeros(0, t) for t in ("i4", "i8", "i4", "i4", "i4", "i8")]
    inputs = _native.ModelInputs(*arrays, [], [], *np.zeros((2, 0), "i4"))
    with pytest.raises(ValueError, match="finish"):
        model.step(inputs, 0, 0, 0)
    core = driver.executor.core
    for add in (
        lambda: core.add_layer({}), lambda: core.add_rope([1.0] * 8, 1.0), lambda: core.finish(0, -1, 0),
        lambda: core.pack(np.zeros((1, 4), np.uint8), "F32", 1, "f32", False),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="nothing can be added"):
            add()


def test_layers_that_do_not_fit_each_other():
    core = _native.CpuModel(**MODEL)

    def matrix(rows):
        return core.pack(np.zeros((rows, 64 * 4), np.uint8), "F32", 64, "f32", False)

    norm = core.vector(np.ones(64, np.float32))
    layer = {
        "attn_norm": norm, "mlp_norm": norm, "q": matrix(64), "k": matrix(32), "v": matrix(32), "o": matrix(64),
        "mlp": (matrix(64), matrix(64), matrix(64), -1, -1, -1), "rope": -1, "sliding_window": 0, "group": 0, "slot": 0,
    }  # fmt: skip
    for stream, begin, message in ((0, matrix(64), "stream_begin"), (2, norm, "stream")):
        with pytest.raises(ValueError, match=message):
            core.add_layer(layer | {"stream": stream, "stream_begin": begin})
    core.add_layer(layer | {"attn_gate": matrix(64)})
    with pytest.raises(ValueError, match="attn_gate"):
        core.add_layer(layer)
    with pytest.raises(ValueError, match="stream: the first layer has one"):
        core.add_layer(layer | {"attn_gate": matrix(64), "stream": 0})
    with pytest.raises(ValueError, match="made without recurrent layers"):
        core.add_layer(layer | {"recurrent": {}})
    numbers, gated = core.vector(np.ones(4, np.float32)), layer | {"attn_gate": matrix(64)}
    with pytest.raises(ValueError, match="xielu: such an MLP has no gate"):
        core.add_layer(gated | {"xielu": numbers})
    for name in ("inner_attn_norm", "inner_mlp_norm"):
        with pytest.raises(ValueError, match=name):
            core.add_layer(gated | {name: numbers})
    gate = {"mlp_norm_low": matrix(64), "mlp_norm_high": matrix(64)}
    moe = {"router": matrix(2), "experts": [layer["mlp"]] * 2, "experts_per_token": 1, "norm_topk": 1, "sigmoid": 0,
           "scale": 1.0, "sum_eps": 0.0, "num_groups": 1, "groups_per_token": 1, "scales_inputs": 1}  # fmt: skip
    for values, message in (
        (gate | {"moe": moe}, "mlp_norm_low: such experts read"), (gate | {"kept_by_mlp": 0.5}, "mlp_norm_low: the"),
        (gate | {"mlp_norm_high": matrix(32)}, "mlp_norm_high"), ({"attn_norm_low": matrix(5)}, "attn_norm_high"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            core.add_layer(gated | values)
    with pytest.raises(ValueError, match="mlp_norm_low: the gate"):
        core.add_layer({key: value for key, value in (gated | gate).items() if key != "mlp_norm"})
    ungated = moe | {"experts": [(-1, *layer["mlp"][1:])] * 2, "gate_limit": 0.5}
    with pytest.raises(ValueError, match="gate_limit: such experts have a plain gate"):
        core.add_layer(gated | {"moe": ungated})
    with pytest.raises(ValueError, match="set_connections comes before"):
        core.set_connections(2, 2.0, 0.0, norm, norm, norm)


def test_connections_that_do_not_fit():
    core = _native.CpuModel(**MODEL)

    def matrix(rows):
        return core.pack(np.zeros((rows, 64 * 4), np.uint8), "F32", 64, "f32", False)

    def vector(size):
        return core.vector(np.ones(size, np.float32))

    norm, out = vector(64), (vector(2 * 128), vector(2), vector(1))
    for count, numbers, message in (
        (0, out, "num_streams"), (17, out, "num_streams"), (2, (norm, *out[1:]), "mix"), (2, (*out[:2], 99), "scale"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            core.set_connections(count, 2.0, 0.0, *numbers)
    core.set_connections(2, 2.0, 0.0, *out)
    mixes = {
        f"{part}_mix{end}": vector(size)
        for part in ("attn", "mlp")
        for end, size in (("", 4 * 128), ("_base", 4), ("_scale", 2))
    }
    mlp = (matrix(64), matrix(64), matrix(64), -1, -1, -1)
    layer = {
        "attn_norm": norm, "mlp_norm": norm, "q": matrix(64), "k": matrix(32), "v": matrix(32), "o": matrix(64),
        "mlp": mlp, "rope": -1, "sliding_window": 0, "group": 0, "slot": 0, **mixes,
    }  # fmt: skip
    for values, message in (
        ({"attn_mix": norm}, "mix"), ({"mlp_mix_scale": norm}, "mix_scale"), ({"mlp_scale": 0.5}, "such outputs"),
        ({"post_attn_norm": norm}, "such outputs"), ({"kept_by_mlp": 1.0}, "such outputs"),
        ({"parallel_mlp": True}, "in turn"), ({"stream": 0, "stream_begin": norm}, "in turn"),
        ({"layer_scale": 2.0}, "in turn"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            core.add_layer(layer | values)
    for missing, message in (("mlp_mix", "mlp_mix"), ("mlp", "in turn"), ("group", "in turn")):
        with pytest.raises(ValueError, match=message):
            core.add_layer({key: value for key, value in layer.items() if key != missing})
    core.add_layer(layer)


def test_layers_aside_that_do_not_fit():
    core = _native.CpuModel(**MODEL)

    def matrix(rows, cols=64):
        return core.pack(np.zeros((rows, cols * 4), np.uint8), "F32", cols, "f32", False)

    norm, wide = (core.vector(np.ones(size, np.float32)) for size in (64, 128))
    mlp = matrix(96), matrix(96), matrix(64, 96), -1, -1, -1
    layer = {
        "mlp_norm": norm, "o": matrix(64), "mlp": mlp, "rope": -1, "sliding_window": 0, "group": 0, "slot": 0,
    }  # fmt: skip
    plain = layer | {"attn_norm": norm, "q": matrix(64), "k": matrix(32), "v": matrix(32)}
    assert core.again(plain["q"]) > plain["v"]
    with pytest.raises(ValueError, match="matrix"):
        core.again(1000)
    aside = layer | {"attn_norm": wide, "q": matrix(64, 128), "k": matrix(32, 128), "v": matrix(32, 128)}
    aside |= {"aside": matrix(64), "mlp_low": matrix(3), "gate_high": matrix(96, 3), "up_high": matrix(96, 3)}
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        aside |= {f"{name}_low": matrix(5, 128), f"{name}_high": matrix(rows, 5)}
    without = {key: value for key, value in aside.items() if key != "aside"}
    wrong = [
        (aside | {"attn_norm": norm}, "attn_norm"), (aside | {"q": plain["q"]}, "q"), (aside | {"moe": {}}, "aside"),
        (aside | {"beside": True}, "aside"), (aside | {"k_low": matrix(5)}, "k_low"), (without, "q|attn_norm"),
        (aside | {"mlp_low": matrix(3, 96)}, "mlp_low"), (aside | {"up_high": matrix(96, 4)}, "up_high"),
        (aside | {"post_attn_norm": norm}, "aside"), (aside | {"mlp": (-1, *mlp[1:])}, "mlp_low"),
        (plain | {name: aside[name] for name in aside if name.endswith(("low", "high"))}, "q_low: the layer is not"),
    ]  # fmt: skip
    for values, message in wrong:
        with pytest.raises(ValueError, match=message):
            core.add_layer(values)
    core.add_layer(aside)
    core.set_embedding(np.zeros((50, 256), np.uint8), "F32", 64)
    with pytest.raises(ValueError, match="the last one is not aside"):
        core.finish(norm, -1, matrix(50))
    gate = {"attn_norm_low": matrix(5), "attn_norm_high": matrix(64, 5)}
    with pytest.raises(ValueError, match="attn_norm_low: the gate is that of a norm of the one residual stream"):
        core.add_layer(plain | gate)
    for values in (aside, plain | {"beside": True}, {"mlp": mlp, "mlp_norm": norm}):
        with pytest.raises(ValueError, match="aside: a layer with a mixer follows"):
            core.add_layer(values)
    core.add_layer(plain)
    core.finish(norm, -1, matrix(50))
