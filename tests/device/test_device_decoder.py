"""Decoders of many kinds on the kernels against the NumPy executor, through an engine."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import ON_GPU, WHERE, Device
from kernel_reference import SPECS, random_weights, rope, tiny_spec

from foreword.batch import KVGroup, PaddingBuckets, SamplingParams
from foreword.device.attention import Tile
from foreword.engine import Engine, engine_config
from foreword.errors import ConfigError
from foreword.executors.device import DeviceExecutor
from foreword.executors.kinds import KINDS
from foreword.executors.numpy import NumpyExecutor
from foreword.executors.options import DeviceOptions
from foreword.executors.torch import on_rows
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.grouped import waits_for_host
from foreword.executors.torch.on_rows import DecoderOnRows
from foreword.models.spec import IndexerSpec, LayerSpec, MlaSpec, MoeSpec, QueryGrowth

POOL = {"num_blocks": 40, "block_size": 4}
SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2}
DECODERS = {
    "windows, norms and caps": tiny_spec(
        **SMALL, qk_norm=True, post_norms=True, attn_softcap=4.0, final_softcap=3.0, activation="gelu_tanh",
        layers=(LayerSpec(rope(16, 100.0), 6), LayerSpec(rope(16))),
    ),
    "experts, biases, a gate per head, no rotation": tiny_spec(
        **SMALL, qkv_bias=True, attn_gate=True, head_gates=True, tie_embeddings=True,
        layers=(LayerSpec(rope(12), moe=MoeSpec(3, 2, 16)), LayerSpec(None)),
    ),
    "chunks, growing queries": tiny_spec(
        **SMALL,
        layers=(
            LayerSpec(rope(16), 6, chunked=True, unit_qk_eps=1e-3), LayerSpec(None, query_growth=QueryGrowth(3, 0.4)),
            LayerSpec(rope(16), 6, chunked=True), LayerSpec(rope(16), query_growth=QueryGrowth(4, 0.7, offset=0)),
        ),
    ),
    "norms inside attention and MLP": tiny_spec(**SMALL, inner_norms=True, gated_mlp=False, xielu=True),
    "latent attention": tiny_spec(
        **{**SMALL, "num_kv_heads": 1}, head_dim=28, mla=MlaSpec(24, 20, 12, 8, 18), layers=(LayerSpec(rope(8)),) * 2
    ),
}  # fmt: skip


def tokens(spec, executor) -> dict[str, list[int]]:
    groups = [KVGroup(4, sliding_window=group.sliding_window) for group in spec.kv_groups()]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 4, "check": "full"}
    engine = Engine(
        executor, vocab_size=50, max_model_len=40, kv_groups=groups, num_blocks=40, tokenizer=None,
        config=engine_config(settings),
    )  # fmt: skip
    rng, done = np.random.default_rng(5), {}
    for i, n in enumerate((11, 3)):
        engine.add_request(str(i), rng.integers(0, 50, n).tolist(), SamplingParams(temperature=0, max_tokens=4))
    while engine.has_work:
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return done


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_equal_the_numpy_executors(name):
    torch.set_num_threads(1)
    spec = DECODERS[name]
    weights = random_weights(spec)
    model = DecoderOnRows(spec, weights, **POOL, device=WHERE, dtype="fp32")
    buckets = PaddingBuckets((4, 8), max_num_reqs=4) if model.may_be_captured else None
    executor = DeviceExecutor(model, Device(), buckets=buckets)
    found = tokens(spec, executor)
    assert found == tokens(spec, NumpyExecutor(spec, weights, **POOL))


@pytest.mark.parametrize("kv_format", ["auto", "fp8"])
def test_the_head_of_latent_attention_is_stored_once_as_the_pool_is_planned(kv_format):
    spec = DECODERS["latent attention"]
    weights, options = random_weights(spec), DeviceOptions(dtype="fp32", kv_format=kv_format)
    model = DecoderOnRows(spec, weights, **POOL, device=WHERE, dtype="fp32", kv_format=kv_format)
    planned = KINDS["device"].bytes_per_value(spec, weights, options) * POOL["block_size"] * spec.token_size
    assert model.cache.block_bytes == planned * spec.num_slots
    assert tokens(spec, DeviceExecutor(model, Device())) == tokens(spec, NumpyExecutor(spec, weights, **POOL))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU whose product of experts does not wait for the host")
def test_experts_are_captured_and_give_the_tokens_of_the_torch_executor():
    spec = DECODERS["experts, biases, a gate per head, no rotation"]
    weights, options = random_weights(spec), {**POOL, "device": WHERE, "dtype": "bf16"}
    model = DecoderOnRows(spec, weights, **options)
    if not model.may_be_captured:
        pytest.skip("the product of experts waits for the host")
    executor = DeviceExecutor(model, Device(), buckets=PaddingBuckets((4, 8), max_num_reqs=4))
    found = tokens(spec, executor)
    assert executor._graphs
    assert None not in executor._graphs.values()
    assert found == tokens(spec, TorchExecutor(spec, weights, **options))


@pytest.mark.parametrize("weight_format", ["int8", "q4"])
def test_rounded_weights_give_the_tokens_of_the_torch_executor(weight_format):
    spec = DECODERS["windows, norms and caps"]
    dtype = "bf16" if ON_GPU and weight_format == "q4" else "fp32"  # torch's product of 4 bits on a GPU is of bfloat16
    weights, options = random_weights(spec), {**POOL, "device": WHERE, "dtype": dtype, "weight_format": weight_format}
    found = tokens(spec, DeviceExecutor(DecoderOnRows(spec, weights, **options), Device()))
    assert found == tokens(spec, TorchExecutor(spec, weights, **options))
    assert [len(ids) for ids in found.values()] == [4, 4]


def test_wide_heads_need_operands_of_16_bits():
    assert Tile.of(16, 576, "bfloat16").rows
    with pytest.raises(ConfigError, match=r"heads of 576 numbers.* use dtype='bf16'"):
        Tile.of(16, 576, "float32")


def test_a_model_with_recurrent_layers_is_refused():
    spec = replace(SPECS["mamba2"])
    with pytest.raises(ConfigError, match="recurrent layers"):
        DecoderOnRows(spec, random_weights(spec), **POOL, device=WHERE)


def test_a_model_with_indexers_is_refused():
    spec = replace(DECODERS["latent attention"], indexer=IndexerSpec(2, 12, 5))
    with pytest.raises(ConfigError, match=r"tiny has indexers that choose keys, .* use executor='torch'"):
        DecoderOnRows(spec, random_weights(spec), **POOL, device=WHERE)


@pytest.mark.parametrize(
    ("capability", "dtype", "waits"),
    [
        ((9, 0), torch.bfloat16, False),
        ((9, 0), torch.float16, True),
        ((10, 0), torch.bfloat16, False),
        ((8, 0), torch.bfloat16, True),
        ((8, 9), torch.float32, True),
    ],
)
def test_experts_are_captured_where_their_product_does_not_wait_for_the_host(monkeypatch, capability, dtype, waits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert waits_for_host(torch.device("cuda"), dtype) is waits
    assert not waits_for_host(torch.device("cpu"), dtype)


def test_graphs_of_a_model_that_waits_for_the_host_are_left_out_or_refused(monkeypatch):
    monkeypatch.setattr(on_rows, "waits_for_host", lambda device, dtype: True)
    sizes = {**POOL, "max_num_seqs": 4, "max_num_batched_tokens": 8, "device": WHERE, "dtype": "fp32"}
    for name, has_experts in (
        ("windows, norms and caps", False),
        ("experts, biases, a gate per head, no rotation", True),
    ):
        spec = DECODERS[name]
        weights = random_weights(spec)
        assert DecoderOnRows(spec, weights, **POOL, device=WHERE).may_be_captured is not has_experts
        if has_experts:
            with pytest.raises(ConfigError, match="max_graph_tokens=4: the product of experts"):
                on_rows.device_executor(spec, weights, **sizes, max_graph_tokens=4)
        else:
            executor = on_rows.device_executor(spec, weights, **sizes, max_graph_tokens=4)
            assert executor.pad_for(3, 2) == (4, 4)
