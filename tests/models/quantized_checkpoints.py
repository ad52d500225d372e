"""Random matrices as FP8, AWQ and GPTQ checkpoints store them, and their weights by loops over single elements.

A drawn matrix is {suffix: array} under the names of the format; `LOOPS` turn it into float64 [out, in].
"""

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
    weight = parts["weight"]
    scale = next(value for name, value in parts.items() if name != "weight")
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
