"""Weights of 8 and 4 bits on PyTorch: the logits of the rounded weights, in the memory of their integers."""

import re
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")

from foreword.errors import ConfigError
from foreword.executors.torch.encoder import TorchEncoderExecutor
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.integers import IntegerMatrix
from foreword.executors.torch.options import DTYPES
from foreword.executors.torch.shard import Shards
from foreword.executors.torch.weights import Loader
from foreword.models.pooling import PoolingSpec
from foreword.models.quants import Quant
from foreword.models.weights import Weights
from kernels.kernel_driver import Driver
from kernels.kernel_reference import SPECS, Reference, float_tensor, of_steps, random_blocks, random_weights
from kernels.test_kernel_encoder import SPECS as ENCODERS
from kernels.test_kernel_encoder import weights_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ERRORS = {"fp32": 2e-5, "fp16": 0.02, "bf16": 0.12}
MATRIX = re.compile(
    r"(layers|blocks)\.\d+\.(q_a|q|index_q|kv_a|k|v|o|attn_gate|gate|up|down|aside|mlp_low|[qkv]_low|(q|k|v|gate|up)_high|state\.([qkvzo]|late_v))"
)
CONVOLUTION = re.compile(r"layers\.\d+\.state\.beta")
"""In a short convolution this is a matrix, too; elsewhere it has a row per head and stays as it is."""
OF_VALUES = re.compile(r"layers\.\d+\.state\.(q|k)")
"""In mamba1 these are products of the values, which stay as they are."""
DENSE = [name for name, spec in SPECS.items() if not any(layer.experts for layer in spec.layers)]


def int8(values, dtype):
    """Each row in 127 steps of its largest magnitude. A step is a number of the dtype."""
    step = held(np.abs(values).max(1, keepdims=True) / np.float32(127), dtype)
    return np.clip(np.rint(values / step), -127, 127) * step


def q4(values, dtype):
    """Each 32 columns in 15 steps from the least to the largest, of which the eighth and the step are numbers of the
    dtype. Zeros fill the last 32.
    """
    groups = np.pad(values, ((0, 0), (0, -values.shape[1] % 32))).reshape(len(values), -1, 32)
    least, fifteen = groups.min(2, keepdims=True), np.float32(15)
    step = groups.max(2, keepdims=True) / fifteen - least / fifteen
    middle, step = held(least + 8 * step, dtype), held(step, dtype)
    near = (np.clip(np.rint((groups - middle) / step), -8, 7) * step + middle).reshape(len(values), -1)
    return near[:, : values.shape[1]]


def held(values, dtype):
    return torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()


ROUNDED = {"int8": int8, "q4": q4}


def rounded(spec, weights: Weights, weight_format: str, dtype: str) -> Weights:
    """The weights with the layers' matrices rounded."""
    kinds = {layer.recurrent.kind for layer in spec.layers if layer.recurrent}

    by_channel = any(layer.recurrent.channel_decays for layer in spec.layers if layer.recurrent)

    def is_rounded(name):
        if name.endswith(".state.dt"):  # a matrix of the size of others, or one that stays as it is
            return by_channel
        if CONVOLUTION.fullmatch(name):
            return "short_conv" in kinds
        return MATRIX.fullmatch(name) and not ("mamba1" in kinds and OF_VALUES.fullmatch(name))

    return {
        name: float_tensor(ROUNDED[weight_format](tensor.dequantize(), dtype)) if is_rounded(name) else tensor
        for name, tensor in weights.items()
    }


def make(spec, weights, **options):
    return TorchExecutor(spec, weights, num_blocks=400, block_size=4, **{"dtype": "fp32", "num_threads": 1, **options})


def product_of(table, shards=None, weight_format="q4", split=None, dtype=torch.float32):
    load = Loader(table, torch.device("cpu"), dtype, shards, weight_format)
    return load.linear("", table, split=split)


def numbers_of(product):
    """The weights of a product, from a step of many tokens."""
    product.weight.few_rows = 0
    return product.weight.product(torch.eye(len(product.inputs)), None).T.numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("weight_format", ROUNDED)
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_the_rounded_weights(name, weight_format, dtype, device):
    """In steps of many tokens and of few."""
    spec, weights = SPECS[name], random_weights(SPECS[name])
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 40).tolist()
    options = {"weight_format": weight_format, "dtype": dtype, "device": device}
    if weight_format == "q4" and device == "cuda" and dtype != "bf16":
        with pytest.raises(ConfigError, match="has no such product on cuda"):
            make(spec, weights, **options)
        return
    want = Reference(spec, rounded(spec, weights, weight_format, dtype)).logits(tokens)
    # A GPU's product of 4 bits rounds each weight to bfloat16.
    most = 0.2 if weight_format == "q4" and device == "cuda" else of_steps(spec, ERRORS[dtype])
    executor = make(spec, weights, **options)
    for layer in executor.decoder.layers:
        for weight in (product.weight for product in layer.products):
            # Where few_rows is larger, the product takes any number of rows.
            if isinstance(weight, IntegerMatrix) and weight.few_rows <= sys.maxsize // 2:
                weight.few_rows = min(weight.few_rows, 16)
    run = Driver(spec, weights, executor=executor, block_size=4)
    for logits, position in zip(run.run_alone("a", tokens, [31, 1, 7, 1]), (30, 31, 38, 39), strict=True):
        assert np.abs(logits - want[position]).max() < most * np.abs(want[position]).max()


@pytest.mark.parametrize("weight_format", ROUNDED)
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_ranks_have_the_numbers_of_one_process(split, weight_format):
    rng = np.random.default_rng(0)
    values = {"a": rng.normal(size=(9, 140)), "b": rng.normal(size=(6, 140)) * 1e-3}
    table = {name: float_tensor(of) for name, of in values.items()}
    whole = numbers_of(product_of(table, None, weight_format))
    for name, want in values.items():
        one = {name: table[name]}
        parts = [numbers_of(product_of(one, Shards(rank, 3), weight_format, split)) for rank in range(3)]
        got = np.concatenate(parts, axis=0 if split == "outputs" else 1)
        np.testing.assert_array_equal(got, whole[: len(want)] if name == "a" else whole[9:])
        np.testing.assert_allclose(got, ROUNDED[weight_format](want.astype(np.float32), "fp32"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight_format", ROUNDED)
def test_few_and_many_tokens_have_the_same_numbers(weight_format):
    """The columns of a rank may begin and end within a group."""
    rng = np.random.default_rng(0)
    table = {"a": float_tensor(rng.normal(size=(70, 280)))}
    product = product_of(table, Shards(1, 3), weight_format, "inputs", torch.bfloat16)
    x = torch.from_numpy(rng.normal(size=(4, len(product.inputs)))).bfloat16()
    few = product.weight.product(x, None)
    product.weight.few_rows = 0
    many = product.weight.product(x, None)
    assert (few - many).abs().max() < 0.02 * many.abs().max()


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q4_K])
def test_files_of_4_bits_keep_their_numbers(quant):
    tensor = random_blocks(quant, (70, 512), np.random.default_rng(1))
    want = tensor.dequantize()
    got = numbers_of(product_of({"m": tensor}))
    assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()


@pytest.mark.parametrize("weight_format", ROUNDED)
def test_extreme_rows_are_finite(weight_format):
    weights = np.array([[0, 0], [3e38, -1e38], [1e-44, 0], [1, -1], [5, 5]], np.float32)
    got = numbers_of(product_of({"m": float_tensor(weights)}, None, weight_format))
    if weight_format == "int8":
        steps = np.abs(weights).max(1, keepdims=True) / 127
    else:  # zeros fill the group
        steps = (weights.max(1, keepdims=True).clip(0) / 15) - weights.min(1, keepdims=True).clip(None, 0) / 15
    assert np.all(np.abs(got - weights) <= 0.501 * steps + 1e-43)


@pytest.mark.parametrize(("dtype", "bytes_per_scale"), [("fp32", 4), ("bf16", 2)])
def test_memory_is_that_of_the_integers(dtype, bytes_per_scale):
    spec, weights = SPECS["llama"], random_weights(SPECS["llama"])
    for weight_format in ROUNDED:
        for layer in make(spec, weights, dtype=dtype, weight_format=weight_format).decoder.layers:
            for product in layer.products:
                outputs, inputs = sum(map(len, product.outputs)), len(product.inputs)
                if weight_format == "int8":
                    size = outputs * (-(-inputs // 16) * 16 + bytes_per_scale)
                else:
                    size = -(-outputs // 64) * 64 * -(-inputs // 32) * (16 + 2 * bytes_per_scale)
                assert product.weight.nbytes == size


@pytest.mark.parametrize("weight_format", ROUNDED)
def test_encoders_have_integers_too(weight_format):
    for spec in ENCODERS.values():
        executor = TorchEncoderExecutor(spec, weights_of(spec), PoolingSpec(), weight_format=weight_format)
        assert all(isinstance(layer.qkv.weight, IntegerMatrix) for layer in executor.layers)


@pytest.mark.parametrize("weight_format", ROUNDED)
def test_what_cannot_be_integers_is_refused_by_name(weight_format, monkeypatch):
    named = f"weight_format='{weight_format}': PyTorch "
    with pytest.raises(ConfigError, match=named + "has no such product of experts"):
        make(SPECS["moe"], random_weights(SPECS["moe"]), weight_format=weight_format)

    def absent(*_):
        raise NotImplementedError

    monkeypatch.setattr(IntegerMatrix.__subclasses__()[list(ROUNDED).index(weight_format)], "_product", absent)
    with pytest.raises(ConfigError, match=named + ".* has no such product on cpu"):
        make(SPECS["llama"], random_weights(SPECS["llama"]), weight_format=weight_format)
