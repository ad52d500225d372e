"""gpt-oss: experts in MXFP4, in both kinds of files, and attention sinks."""

import numpy as np
import pytest

from foreword.errors import ConfigError, ModelError
from foreword.executors.native import packed_format
from foreword.models.loader import load_model
from foreword.models.quants import Quant
from models import gguf_writer
from models.gguf_models import gguf_tensors, metadata
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CONFIG = {**TINY["gpt-oss"]["config"], "hidden_size": 64, "intermediate_size": 96}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def of_sizes(shape):
    """A shape of the tiny model in that of CONFIG."""
    return [{32: 64, 40: 96, 80: 192}.get(size, size) for size in shape]


def decoded(bits, scales):
    """The weights [..., 32 n] of E2M1 bits [..., n, 32] and scales [..., n], one by one from the definition."""
    out = np.empty(bits.shape, np.float64)
    for at in np.ndindex(bits.shape):
        sign, number = divmod(int(bits[at]), 8)
        out[at] = (-1) ** sign * E2M1[number] * 2.0 ** (int(scales[at[:-1]]) - 127)
    return out.reshape(*bits.shape[:-2], -1).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    """(the tensors without experts, {name: (bits, scales)} of the experts [E, out, in])."""
    tensors = random_tensors({name: of_sizes(shape) for name, shape in TINY["gpt-oss"]["shapes"].items()})
    rng, experts = np.random.default_rng(2), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        bits = rng.integers(0, 16, (count, rows, columns // 32, 32), np.uint8)
        experts[name] = bits, rng.integers(122, 126, (count, rows, columns // 32), np.uint8)
    return tensors, experts


def as_floats(tmp_path, model):
    tensors, experts = model
    plain = {name: np.ascontiguousarray(decoded(*of).swapaxes(1, 2)) for name, of in experts.items()}
    return load_model(write_model(tmp_path / "floats", CONFIG, tensors | plain))


def as_safetensors(tmp_path, model):
    tensors, experts = dict(model[0]), model[1]
    for name, (bits, scales) in experts.items():
        pairs = bits.reshape(*scales.shape, 16, 2)
        tensors[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).view(np.int8)
        tensors[f"{name}_scales"] = scales.view(np.int8)
    return load_model(write_model(tmp_path / "mxfp4", CONFIG | QUANTISED, tensors))


def as_gguf(tmp_path, model):
    tensors, experts = model
    arrays = gguf_tensors(CONFIG, tensors)
    found = {name: (Quant.F32, array.shape, gguf_writer.f32(array).ravel()) for name, array in arrays.items()}
    for name, (bits, scales) in experts.items():
        layer, blocks = (
            name.split(".")[2],
            np.concatenate([scales[..., None], bits[..., :16] | bits[..., 16:] << 4], -1),
        )
        shape = (*bits.shape[:2], bits.shape[2] * 32)
        parts = {"down": blocks} if "down" in name else {"gate": blocks[:, ::2], "up": blocks[:, 1::2]}
        for part, of in parts.items():
            found[f"blk.{layer}.ffn_{part}_exps.weight"] = Quant.MXFP4, (len(of), of.shape[1], shape[2]), of.ravel()
    more = {"gpt-oss.rope.scaling.type": ("str", "yarn"), "gpt-oss.rope.scaling.factor": ("f32", 4),
            "gpt-oss.rope.scaling.original_context_length": ("u32", 16)}  # fmt: skip
    return load_model(gguf_writer.write(tmp_path / "model.gguf", metadata(CONFIG) | more, found))


def as_mlx(tmp_path, model):
    """Gate and up apart, as 32-bit words of 8 numbers, the first in the lowest bits, and biases apart, too."""
    tensors, experts = dict(model[0]), model[1]
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}

    def parts(name, array):
        path = name.removesuffix("_bias").removesuffix("gate_up_proj")
        names = [f"{path}gate_proj", f"{path}up_proj"] if "gate_up" in name else [path]
        return zip(names, [array[:, k :: len(names)] for k in range(len(names))], strict=True)

    for name, (bits, scales) in experts.items():
        words = np.zeros((*bits.shape[:2], bits.shape[2] * 4), np.uint32)
        for i in range(8):
            words |= bits.reshape(*words.shape, 8)[..., i].astype(np.uint32) << 4 * i
        tensors |= {f"{own}.weight": np.ascontiguousarray(part) for own, part in parts(name, words)}
        tensors |= {f"{own}.scales": np.ascontiguousarray(part).view("|i1") for own, part in parts(name, scales)}
        bias = tensors.pop(f"{name}_bias")
        tensors |= {f"{own}.bias": np.ascontiguousarray(part) for own, part in parts(name, bias)}
    both = {"quantization": settings, "quantization_config": settings}
    return load_model(write_model(tmp_path / "mlx", CONFIG | both, tensors))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("read", [as_safetensors, as_gguf, as_mlx])
def test_weights_in_mxfp4_are_those_that_their_bits_define(tmp_path, model, read):
    want, found = as_floats(tmp_path, model).weights, read(tmp_path, model).weights
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name].dequantize(), tensor.dequantize(), err_msg=name)
    quants = {found[f"layers.0.experts.1.{part}"].quant for part in ("gate", "up", "down")}
    assert quants == {Quant.MXFP4}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("read", [as_safetensors, as_mlx])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_experts_in_mxfp4_give_the_logits_of_their_floats(tmp_path, model, executor, read):
    config = {**CONFIG, "swiglu_limit": 7.0}
    text = TINY["gpt-oss"]["token_ids"]
    assert config["swiglu_limit"] != CONFIG["swiglu_limit"]
    floats, stored = as_floats(tmp_path, model), read(tmp_path, model)
    [want] = all_logits(floats, [text], in_chunks([text], [24]), "numpy", block_size=4)
    [found] = all_logits(stored, [text], in_chunks([text], [5, 1]), executor, block_size=4)
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_mxfp4_is_packed_in_four_bits():
    assert packed_format(Quant.MXFP4, "auto") == "fp4"


def test_scales_that_do_not_fit_the_blocks_are_refused(tmp_path, model):
    tensors, experts = dict(model[0]), model[1]
    name, (bits, scales) = next(iter(experts.items()))
    tensors[f"{name}_blocks"] = bits[..., :16].view(np.int8)
    tensors[f"{name}_scales"] = scales[:, 1:].view(np.int8)
    with pytest.raises(ModelError, match=r"_blocks': shape .* does not fit scales"):
        load_model(write_model(tmp_path / "model", CONFIG | QUANTISED, tensors))


def test_ranks_that_share_positions_refuse_sinks(tmp_path):
    shard = pytest.importorskip("foreword.executors.torch.shard")
    with pytest.raises(ConfigError, match="gpt_oss has attention sinks, which ranks cannot merge; use 1"):
        shard.Shards(0, 1, 2).spec(load_model(make(tmp_path, "gpt-oss")).spec)
