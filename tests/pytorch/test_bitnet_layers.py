"""BitNet checkpoints against the layers of transformers that compute them, with inputs of products in 8 bits."""

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
transformers = pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")

from transformers.utils.quantization_config import BitNetQuantConfig

from foreword.models.loader import load_model
from models.recorded import TINY
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors, write_model

with warnings.catch_warnings():  # modules of PyTorch that compile warn of each other
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers.integrations import bitnet

SCALE = 0.0625
"""The scale of every matrix, which all number formats have."""
MODES = (("autobitlinear", "online"), ("autobitlinear", "offline"), ("bitlinear", "offline"))
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def stored(tensors, linear_class, mode):
    """The tensors of a checkpoint, packed by transformers, whose matrices have a mean magnitude of `SCALE`."""
    found = {}
    for name, value in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = value
            continue
        value = (value * (SCALE / np.abs(value).mean())).astype("<f4")
        if mode == "online":
            found[name] = value
            continue
        integers = torch.from_numpy(value / np.float32(SCALE)).round().clamp(-1, 1)
        found[name] = bitnet.pack_weights(integers).numpy().view(np.int8)
        scale = 1 / SCALE if linear_class == "bitlinear" else SCALE
        found[f"{name}_scale"] = np.array([scale], "<f4")
    return found


def reference(config, tensors, quantization):
    """Logits of the model of transformers with its layers for this quantisation."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager"
    ).float()
    bitnet.replace_with_bitnet_linear(model, ["lm_head"], quantization)
    model.to_empty(device="cpu")
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        module, tensor = model.get_submodule(stem), torch.from_numpy(np.asarray(value))
        if kind == "weight" and tensor.dtype is torch.int8:
            tensor = tensor.view(torch.uint8)
            if isinstance(module, bitnet.AutoBitLinear):
                tensor = bitnet.unpack_weights(tensor, torch.float32)
            module.dtype = torch.float32
        setattr(module, kind, torch.nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() and
                kind == "weight" else torch.nn.Buffer(tensor))  # fmt: skip
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    with torch.no_grad():
        return model.eval()(torch.tensor([TEXT])).logits[0].numpy()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("linear_class", "mode"), MODES)
@pytest.mark.parametrize("name", ["bitnet", "llama3"])
def test_logits_equal_those_of_the_layers_of_transformers(tmp_path, name, linear_class, mode, executor):
    quantization = BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
    config = TINY[name]["config"]
    tensors = stored(random_tensors(TINY[name]["shapes"]), linear_class, mode)
    with torch.compiler.set_stance("force_eager"):  # compilation takes a minute
        want = reference(config, tensors, quantization)
    own = {"quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode}
    model = load_model(write_model(tmp_path, {**config, "quantization_config": own}, tensors))
    [got] = all_logits(model, [TEXT], whole([TEXT]), executor)
    np.testing.assert_allclose(got, want, atol=1e-4)
