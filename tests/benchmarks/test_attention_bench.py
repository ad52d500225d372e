"""The benchmark of attention counts the bytes and operations of its steps, here one by one."""

from pathlib import Path

import pytest
from parts import attention
from parts.kernels import Roofline

from foreword.native import available

LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64  # the shape of the default model


@pytest.mark.long
@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_rates_are_bytes_and_operations_per_second(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch):
    roof = Roofline("some", memory_gb_s=2.0, f32_gflop_s=3.0, bf16_gflop_s=5.0, int8_gop_s=7.0)
    monkeypatch.setattr(attention, "measure_roofline", lambda num_threads: roof)
    monkeypatch.setattr(attention, "PREFILL", 4)
    found = list(
        attention.run(
            model=str(smollm2_path), kv_formats=("int8", "fp32"), rows=(2,), contexts=(31,), cache_bytes=2 * 10**6,
            repeats=1,
        )
    )  # fmt: skip
    assert found.pop(0) is roof
    number, scale, peak = {"int8": 1, "fp32": 4}, {"int8": 4, "fp32": 0}, {"int8": 7.0, "fp32": 3.0}
    assert [(r.kv_format, r.num_reqs, r.query_len) for r in found] == [
        (kv_format, *shape) for kv_format in ("int8", "fp32") for shape in ((2, 1), (1, 4))
    ]
    for r in found:
        token = 2 * KV_HEADS * (DIM * number[r.kv_format] + scale[r.kv_format])  # bytes in a layer
        length = r.num_reqs * (r.context + r.query_len)
        assert r.num_layers == min(LAYERS, 2 * 10**6 // (token * length))
        seen = sum(r.context + i + 1 for _ in range(r.num_reqs) for i in range(r.query_len))
        operations = r.num_layers * HEADS * seen * 2 * 2 * DIM
        assert r.gb_s == pytest.approx(r.num_layers * token * length / (1e6 * r.ms))
        assert r.gop_s == pytest.approx(operations / (1e6 * r.ms))
        assert r.memory == pytest.approx(r.gb_s / 2)
        assert r.arithmetic == pytest.approx(r.gop_s / peak[r.kv_format])
