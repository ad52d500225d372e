"""The memory beside the KV pool: the estimate against what a process takes, and the pool's size that follows."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from test_llm import tiny_model

from foreword.engine.build import build_engine, load
from foreword.engine.config import engine_config
from foreword.engine.memory import KV_POOL_BYTES, HostMemory
from foreword.errors import ConfigError
from foreword.executors.memory import ROW_PADDING

GIB, MIB = 1 << 30, 1 << 20

MEASURED = """
from dataclasses import replace
import numpy as np
from test_llm import tiny_model
from foreword import LLM, SamplingParams
from foreword.engine.build import load
from foreword.engine.config import engine_config
from foreword.machine import own_memory_bytes
from foreword.models.spec import weight_names
from foreword.models.weights import float_tensor

given = tiny_model((None, None))
spec = replace(given.spec, vocab_size=8192, hidden_size=256, intermediate_size=1024, num_heads=8, num_kv_heads=2,
               head_dim=32, max_model_len=512)
weights = {name: float_tensor(np.full(shape, 0.01, np.float32)) for name, shape in weight_names(spec)}
given = replace(given, spec=spec, weights=weights)
settings = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_forced_tokens": 0, "num_blocks": 4 * 33 + 1,
            "speculation": "off"}
model = load(given, "native")
config = model.configured(engine_config(settings))
memory = model.memory(config)
llm = LLM(given, executor="native", **settings)
for num_reqs, num_tokens in ((2, 500), (120, 8)):
    prompts = np.random.default_rng(1).integers(1, 8192, (num_reqs, num_tokens)).tolist()
    llm.generate(prompts, SamplingParams(max_tokens=2, temperature=1.0))
taken = own_memory_bytes() - model.pool(config).num_bytes
print(taken >> 20, memory.needed["process"] >> 20, sum(memory.needed.values()) >> 20, memory.needed["weights"] >> 20)
"""


LATENT = """
from dataclasses import replace
import numpy as np
from test_llm import tiny_model
from foreword import LLM, SamplingParams
from foreword.engine.build import load
from foreword.engine.config import engine_config
from foreword.machine import own_memory_bytes
from foreword.models.spec import MlaSpec, weight_names
from foreword.models.weights import float_tensor

given = tiny_model((None, None))
mla = MlaSpec(q_rank=64, kv_rank=256, nope_dim=64, rope_dim=32, value_dim=64)
layers = tuple(replace(one, rope=replace(one.rope, inv_freq=(0.1,) * 16)) for one in given.spec.layers)
spec = replace(given.spec, vocab_size=512, hidden_size=64, intermediate_size=64, num_heads=48, num_kv_heads=1,
               head_dim=mla.rope_dim + mla.kv_rank, max_model_len=600, mla=mla, layers=layers)
weights = {name: float_tensor(np.full(shape, 0.01, np.float32)) for name, shape in weight_names(spec)}
given = replace(given, spec=spec, weights=weights)
settings = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_forced_tokens": 0, "num_blocks": 60,
            "speculation": "off"}
model = load(given, "native")
memory = model.memory(model.configured(engine_config(settings)))
llm = LLM(given, executor="native", **settings)
before = own_memory_bytes()
llm.generate(np.random.default_rng(1).integers(1, 512, (1, 512)).tolist(), SamplingParams(max_tokens=1))
print((own_memory_bytes() - before) >> 20, memory.needed["activations"] >> 20)
"""


def numbers_of(script: str) -> list[int]:
    """Return what a script prints in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    return list(map(int, run.stdout.split()))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_latent_attention_takes_the_activations_that_are_estimated():
    taken, activations = numbers_of(LATENT)
    assert activations * 0.8 <= taken <= activations * 1.1 + 6  # some MiB are those of other things


def test_rows_are_padded_as_the_estimate_says():
    header = Path(__file__).parents[2] / "native" / "kernels" / "memory.h"
    assert f"constexpr int kRowPadding = {ROW_PADDING};" in header.read_text()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_takes_the_memory_that_is_estimated():
    """Long prompts, and 120 requests at a time, in MiB. The weights are there twice: the model's own, in memory."""
    taken, process, needed, weights = numbers_of(MEASURED)
    assert taken <= needed
    assert taken - process >= (needed - process) / 4
    assert taken - process >= weights


def on_a_machine_of(monkeypatch, usable, process=0):
    monkeypatch.setattr("foreword.engine.memory.memory_bytes", lambda: usable)
    monkeypatch.setattr("foreword.engine.memory.own_memory_bytes", lambda: process)


def test_the_default_pool_is_what_weights_and_the_rest_leave():
    memory = HostMemory(8 * GIB, {"weights": 3 * GIB, "logits": GIB}, {"LoRA adapters": GIB, "grammars": GIB})
    assert memory.pool_bytes(0) == KV_POOL_BYTES == 2 * GIB
    assert replace(memory, usable=7 * GIB).pool_bytes(0) == 3 * GIB // 2  # half of 3 is more than 3 − 2
    assert replace(memory, usable=7 * GIB, on_demand={}).pool_bytes(0) == KV_POOL_BYTES
    assert replace(memory, usable=5 * GIB).pool_bytes(0) == GIB // 2
    assert replace(memory, usable=5 * GIB).pool_bytes(GIB) == GIB  # the least that serves one request fits
    assert replace(memory, usable=5 * GIB).pool_bytes(3 * GIB) == GIB
    assert memory.pool_bytes(0, num_pools=2) == GIB


def test_a_pool_by_default_never_exceeds_the_memory(monkeypatch):
    model = load(tiny_model(), "native")
    config = model.configured(engine_config({"max_num_seqs": 64, "block_size": 4, "grammar_cache_bytes": 0}))
    on_a_machine_of(monkeypatch, GIB)
    needed = sum(model.memory(config).needed.values())
    assert needed < 2 * MIB
    for left in (1 << 14, 1 << 16, 1 << 40):
        on_a_machine_of(monkeypatch, needed + left)
        memory = model.memory(config)
        assert 0 < model.pool(config, memory).num_bytes <= left


def test_a_model_that_leaves_nothing_for_one_request_is_refused_with_its_numbers(monkeypatch):
    on_a_machine_of(monkeypatch, 64 * MIB, process=70 * MIB)
    with pytest.raises(
        ConfigError, match=r"max_model_len=64: a KV pool of 0.0 MiB.*process 70 MiB.*of 64 MiB of memory"
    ):
        build_engine(load(tiny_model(), "native"), engine_config({"block_size": 4}))


@pytest.mark.parametrize("given", [{"kv_cache_bytes": "1MiB"}, {"num_blocks": 3000}])
def test_a_pool_that_does_not_fit_is_refused_with_its_numbers(monkeypatch, given):
    on_a_machine_of(monkeypatch, 100 * MIB, process=99 * MIB)
    name = next(iter(given))
    expected = (
        rf"{name}=\d+: a KV pool of \d.\d MiB and, beside it, process 99 MiB.* are 10\d MiB, of 100 MiB of memory"
    )
    options = {"block_size": 4, "max_num_seqs": 64, **given}
    with pytest.raises(ConfigError, match=expected):
        build_engine(load(tiny_model(), "native"), engine_config(options))


def test_a_pool_that_fits_until_adapters_are_there_is_warned_of(monkeypatch):
    on_a_machine_of(monkeypatch, GIB, process=100 * MIB)
    options = {"block_size": 4, "num_blocks": 300}
    with pytest.warns(UserWarning, match=r"num_blocks=300: .*LoRA adapters 1.0 GiB.*if requests use all of it"):
        build_engine(load(tiny_model(), "native"), engine_config(options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_engine(load(tiny_model(), "native"), engine_config({**options, "lora_bytes": 0}))


def test_an_existing_executor_takes_no_memory_again(monkeypatch):
    model, config = load(tiny_model(), "native"), engine_config({"block_size": 4, "num_blocks": 300})
    executor = model.executor(model.pool(model.configured(config)))
    on_a_machine_of(monkeypatch, MIB, process=MIB)
    build_engine(model, config, executor=executor)
