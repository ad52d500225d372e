"""Random matrices as quantised checkpoints store them, and their weights by loops over single elements.

A drawn matrix is {suffix: array} under the names of the format; `LOOPS` turn it into float64 [out, in].
"""

import json
import math
import re

import numpy as np

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column of each nibble of a word, lowest nibble first."""


def e4m3(byte):
    """1 bit of sign, 4 of exponent with bias 7, 3 of mantissa; without infinities."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def fp8(parts, block):
    """Scales of bytes are exponents."""
    weight = parts["weight"]
    scale = next(value for name, value in parts.items() if name != "weight")
    if scale.dtype.kind in "iV":
        scale = [2.0 ** (int(byte) - 127) for byte in scale.view(np.uint8).ravel()]
    out, inner = weight.shape
    grid = np.asarray(scale, np.float64).reshape(math.ceil(out / block[0]), math.ceil(inner / block[1]))
    return np.array(
        [[e4m3(int(weight[o, i])) * grid[o // block[0], i // block[1]] for i in range(inner)] for o in range(out)]
    )


def field(word, position, bits):
    return int(word) >> position * bits & (1 << bits) - 1


def awq(parts, group):
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    inner, out = qweight.shape[0], qweight.shape[1] * 8
    weights = np.empty((out, inner))
    for o in range(out):
        word, position = o // 8, AWQ_ORDER.index(o % 8)
        for i in range(inner):
            g = i // group
            zero = field(qzeros[g, word], position, 4)
            weights[o, i] = (field(qweight[i, word], position, 4) - zero) * float(scales[g, o])
    return weights


def gptq(parts, group, bits=4, version=1):
    qweight, qzeros, scales, g_idx = (parts.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    per_word = 32 // bits
    inner, out = qweight.shape[0] * per_word, qweight.shape[1]
    weights = np.empty((out, inner))
    for o in range(out):
        for i in range(inner):
            g = i // group if g_idx is None else int(g_idx[i])
            zero = field(qzeros[g, o // per_word], o % per_word, bits)
            if version == 1:
                zero = (zero + 1) % (1 << bits)
            weights[o, i] = (field(qweight[i // per_word, o], i % per_word, bits) - zero) * float(scales[g, o])
    return weights


def filled(array, out, count):
    """Zero points or scales [out, count] of one for all or one per row."""
    return np.broadcast_to(array.reshape(-1, count) if array.size > 1 else array.reshape(1, 1), (out, count))


def compressed_integers(parts, group, bits=4):
    """Packed words, or int8, of compressed-tensors; group: 0 for one of all columns."""
    scales, zeros, g_idx = (parts.get(f"weight_{name}") for name in ("scale", "zero_point", "g_idx"))
    is_packed = "weight_packed" in parts
    out, inner = parts["weight_shape"] if is_packed else parts["weight"].shape
    per_word, count = 32 // bits, math.ceil(inner / (group or inner))
    scales, weights = filled(scales, out, count), np.empty((out, inner))
    for o in range(out):
        for i in range(inner):
            g = int(g_idx[i]) if g_idx is not None else i // (group or inner)
            zero = 0
            if is_packed:
                q = field(parts["weight_packed"][o, i // per_word], i % per_word, bits) - 2 ** (bits - 1)
                if zeros is not None:
                    zero = field(zeros[o // per_word, g], o % per_word, bits) - 2 ** (bits - 1)
            else:
                q = int(parts["weight"].view(np.int8)[o, i])
                zero = 0 if zeros is None else int(filled(zeros.view(np.int8), out, count)[o, g])
            weights[o, i] = (q - zero) * float(scales[o, g])
    return weights


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1(byte, second):
    nibble = int(np.uint8(byte)) >> 4 * second & 15
    return math.copysign(E2M1[nibble & 7], -(nibble >> 3) or 1)


def nvfp4(parts):
    if "weight_packed" in parts:
        pairs, factor = parts["weight_packed"], 1 / float(parts["weight_global_scale"][0])
    else:
        pairs, factor = parts["weight"], float(parts["weight_scale_2"][0])
    scales, (out, half) = parts["weight_scale"], pairs.shape
    return np.array(
        [
            [e2m1(pairs[o, i // 2], i % 2) * e4m3(int(scales[o, i // 16])) * factor for i in range(2 * half)]
            for o in range(out)
        ]
    )


def mxfp4(parts):
    pairs, scales = parts["weight_packed"], parts["weight_scale"].view(np.uint8)
    return np.array(
        [
            [math.ldexp(e2m1(row[i // 2], i % 2), int(scales[o, i // 32]) - 127) for i in range(2 * len(row))]
            for o, row in enumerate(pairs)
        ]
    )


def bitsandbytes(parts):
    """4 bit; of 8 bit if there is an SCB."""
    if "SCB" in parts:
        return parts["weight"].view(np.int8) * (parts["SCB"].astype(float)[:, None] / 127)
    [state] = (json.loads(array.tobytes()) for name, array in parts.items() if "quant_state" in name)
    absmax, nested_map = parts["weight.absmax"], parts.get("weight.nested_quant_map")
    (out, inner), flat = state["shape"], parts["weight"].view(np.uint8).ravel()
    weights = np.empty((out, inner))
    for place in range(out * inner):
        nibble, block = int(flat[place // 2]) >> 4 * (1 - place % 2) & 15, place // state["blocksize"]
        if nested_map is None:
            scale = float(absmax[block])
        else:
            whole = float(parts["weight.nested_absmax"][block // state["nested_blocksize"]])
            scale = float(nested_map[int(np.uint8(absmax[block]))]) * whole + state["nested_offset"]
        weights[divmod(place, inner)] = float(parts["weight.quant_map"][nibble]) * scale
    return weights


def words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype("<i4")


def scales(rng, bits, inner, shape, dtype="<f2"):
    """Such that weights are of the size 1 / sqrt(inner)."""
    return (rng.uniform(0.5, 1.5, shape) / (2 ** (bits - 2) * math.sqrt(inner))).astype(dtype)


def draw_fp8(rng, out, inner, block, name="weight_scale"):
    """block: rows and columns of a scale, (1, inner) for one per row, (out, inner) for a single one."""
    weight = rng.integers(0, 256, (out, inner), dtype=np.uint8)
    weight[(weight & 127) == 127] = 0
    grid = math.ceil(out / block[0]), math.ceil(inner / block[1])
    shape = () if grid == (1, 1) else (out, 1) if grid == (out, 1) else grid
    return {"weight": weight, name: (rng.uniform(0.2, 2, shape) / (64 * math.sqrt(inner))).astype("<f4")}


def draw_exponents(rng, out, inner, block, dtype="|i1"):
    """FP8 with scales that are powers of two, as their exponents plus 127."""
    parts = draw_fp8(rng, out, inner, block, "weight_scale_inv")
    grid = math.ceil(out / block[0]), math.ceil(inner / block[1])
    return {**parts, "weight_scale_inv": rng.integers(110, 120, grid, dtype=np.uint8).view(dtype)}


def draw_hqq(rng, out, inner, bits, group, axis, storage="|i1"):
    """One part of the rows in the highest bits of the bytes, the next part in the next bits, and so on."""
    q = rng.integers(0, 1 << bits, (inner * out // group, group) if axis else (group, inner * out // group), np.uint8)
    packed = np.zeros((len(q) * bits // 8, q.shape[1]), np.uint8)
    for row in range(len(q)):
        packed[row % len(packed)] |= q[row] << np.uint8(8 - bits * (row // len(packed) + 1))
    shape = (len(q), 1) if axis else (1, q.shape[1])
    return {
        "W_q": packed.view(storage),
        "scale": (rng.uniform(0.2, 2, shape) / (1 << bits)).astype("<f2"),
        "zero": rng.uniform(0, 1 << bits, shape).astype("<f2"),
        **{name: np.array(value, "<i4") for name, value in (("nbits", bits), ("group_size", group), ("axis", axis))},
        "shape": np.array([out, inner], "<i8"),
        "packing": np.frombuffer(f"{bits}bit_u8".encode(), np.int8),
        **{name: np.array(1, "|i1") for name in ("channel_wise", "encoded_state_dict", "optimize", "round_zero")},
        "bias": np.zeros(out, "<f4"),
    }


def hqq(parts):
    """Unpacked, (q − zero) · scale in the shape of the groups, and then in that of the matrix."""
    packed, bits = parts["W_q"].view(np.uint8), int(parts["nbits"])
    rows = len(packed) * 8 // bits
    groups = np.empty((rows, packed.shape[1]))
    scale, zero = (np.broadcast_to(parts[name].astype(np.float64), groups.shape) for name in ("scale", "zero"))
    for r in range(rows):
        for c in range(packed.shape[1]):
            q = field(packed[r % len(packed), c], 8 // bits - 1 - r // len(packed), bits)
            groups[r, c] = (q - zero[r, c]) * scale[r, c]
    return groups.reshape(parts["shape"])


def draw_awq(rng, out, inner, group):
    count = math.ceil(inner / group)
    return {
        "qweight": words(rng, inner, out // 8),
        "qzeros": words(rng, count, out // 8),
        "scales": scales(rng, 4, inner, (count, out)),
    }


def draw_gptq(rng, out, inner, group, bits=4, zero=None, g_idx=None):
    """zero: the stored zero point of all weights."""
    count = math.ceil(inner / group)
    per_word = 32 // bits
    qzeros = words(rng, count, math.ceil(out / per_word))
    if zero is not None:
        qzeros[:] = np.array(sum(zero << bits * i for i in range(per_word)), "<u4").astype("<i4")
    parts = {
        "qweight": words(rng, inner // per_word, out),
        "qzeros": qzeros,
        "scales": scales(rng, bits, inner, (count, out)),
    }
    return parts if g_idx is None else {**parts, "g_idx": np.asarray(g_idx, "<i4")}


def int8(rng, *shape):
    """As `write_safetensors` takes numbers of type I8."""
    return rng.integers(-128, 128, shape, dtype=np.int8).view("S1")


def draw_packed(rng, out, inner, group, bits=4, symmetric=True, g_idx=None):
    count, per_word = math.ceil(inner / (group or inner)), 32 // bits
    parts = {
        "weight_packed": words(rng, out, math.ceil(inner / per_word)),
        "weight_shape": np.array([out, inner], "<i8"),
        "weight_scale": scales(rng, bits, inner, (out, count)),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(rng, math.ceil(out / per_word), count)
    return parts if g_idx is None else {**parts, "weight_g_idx": np.asarray(g_idx, "<i4")}


def draw_int8(rng, out, inner, shape=None, symmetric=True):
    """shape: of the scales."""
    shape = shape or (out, 1)
    parts = {"weight": int8(rng, out, inner), "weight_scale": scales(rng, 8, inner, shape)}
    return parts if symmetric else {**parts, "weight_zero_point": int8(rng, *shape)}


def draw_nvfp4(rng, out, inner, names=("weight_packed", "weight_global_scale"), factor=3000.0):
    """For modelopt names are those of the pairs and of the factor by which scales are multiplied."""
    scale = rng.integers(40, 100, (out, inner // 16), dtype=np.uint8)
    pairs = rng.integers(-128, 128, (out, inner // 2), dtype=np.int8)
    return {names[0]: pairs, "weight_scale": scale, names[1]: np.array([factor], "<f4")}


def draw_modelopt(rng, out, inner):
    return draw_nvfp4(rng, out, inner, ("weight", "weight_scale_2"), 1 / 3000)


def draw_mxfp4(rng, out, inner):
    pairs = rng.integers(-128, 128, (out, inner // 2), dtype=np.int8)
    return {"weight_packed": pairs, "weight_scale": rng.integers(118, 124, (out, inner // 32), dtype=np.int8)}


def draw_bitsandbytes(rng, out, inner, kind="nf4", nested=False, block=64, storage=np.int8):
    """storage: the type of the array that holds the pairs."""
    blocks, nested_block = math.ceil(out * inner / block), 4
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [out, inner]}
    pairs = rng.integers(-128, 128, math.ceil(out * inner / 2), dtype=np.int8).view(storage)
    parts = {"weight": pairs.reshape(-1, 1), "weight.quant_map": rng.uniform(-1, 1, 16).astype("<f4")}
    if nested:
        state |= {"nested_blocksize": nested_block, "nested_dtype": "float32", "nested_offset": 0.01}
        parts |= {
            "weight.absmax": rng.integers(-128, 128, blocks, dtype=np.int8),
            "weight.nested_absmax": scales(rng, 4, inner, math.ceil(blocks / nested_block), "<f4"),
            "weight.nested_quant_map": rng.uniform(-1, 1, 256).astype("<f4"),
        }
    else:
        parts["weight.absmax"] = scales(rng, 4, inner, blocks, "<f4")
    text = np.frombuffer(json.dumps(state).encode(), np.int8)
    return {**parts, f"weight.quant_state.bitsandbytes__{kind}": text}


def draw_bitsandbytes_8(rng, out, inner):
    own = {"SCB": scales(rng, 8, inner, out, "<f4") * np.float32(127), "weight_format": np.zeros(1, np.int8)}
    return {"weight": int8(rng, out, inner), **own}


def is_linear(name, shape):
    """Return whether such checkpoints quantise a weight: it is of a linear layer, but of neither router nor head."""
    kept = r"embed|\.w[tp]e\.|lm_head|norm|router|(^|\.)gate\.weight|shared_expert_gate|conv"
    return len(shape) == 2 and name.endswith(".weight") and re.search(kept, name) is None


def drawn_instead(tensors, draw, loop, is_drawn, is_turned=lambda name: False):
    """A checkpoint with some of its tensors drawn: as they are stored, and as floats. is_drawn: of a name and shape.
    is_turned: of the name of a matrix whose floats are [in, out].
    """
    random, stored, floats = np.random.default_rng(0), {}, {}
    for name, value in tensors.items():
        shape = value.shape[::-1] if is_turned(name) else value.shape
        if is_drawn(name, shape):
            parts = draw(random, *shape)
            stored |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
            matrix = loop(parts).astype("<f4")
            floats[name] = np.ascontiguousarray(matrix.T) if is_turned(name) else matrix
        else:
            stored[name] = floats[name] = value
    return stored, floats
