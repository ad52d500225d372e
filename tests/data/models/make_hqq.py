"""Record hqq.json: small matrices that HQQ quantised, packed and unpacked again.

Needs hqq, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_hqq.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from hqq.core.quantize import Quantizer

FORMS = [(1, 0, False), (2, 1, True), (4, 0, True), (4, 1, False), (8, 1, True)]
"""Bits, the axis of groups, and whether the bytes are viewed as floats."""


def matrix(bits, axis, as_floats):
    generator = torch.Generator().manual_seed(bits)
    given = torch.randn(16, 32, generator=generator) * 0.05
    packed, meta = Quantizer.quantize(
        given, nbits=bits, group_size=8, axis=axis, round_zero=bits == 4, view_as_float=as_floats, device="cpu",
        compute_dtype=torch.float16
    )  # fmt: skip
    meta |= {"scale": meta["scale"].half(), "zero": meta["zero"].half(), "compute_dtype": torch.float32}
    return {
        "nbits": bits, "group_size": 8, "axis": axis, "shape": list(meta["shape"]),
        "W_q": packed.view(torch.uint8).tolist(), "as_floats": as_floats,
        **{name: meta[name].float().tolist() for name in ("scale", "zero")},
        "values": [[round(x, 7) for x in row] for row in Quantizer.dequantize(packed, meta).tolist()],
    }  # fmt: skip


if __name__ == "__main__":
    found = {"hqq": version("hqq"), "matrices": [matrix(*form) for form in FORMS]}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    Path(__file__).with_name("hqq.json").write_text(f"{{{lines}}}\n")
