"""The notes of commands about a quantised checkpoint that was converted."""

import json
import shutil

import numpy as np
import pytest
from processes import run, start

from foreword.models.safetensors import read_safetensors
from models.quantized_checkpoints import draw_fp8
from models.tiny import write_safetensors

LINE = "matrices converted from FP8 with a scale per row to F32: 2. A weight changes by at most 0"


@pytest.fixture(scope="module")
def converted(talker, tmp_path_factory):
    """The talker with two matrices in FP8."""
    folder = tmp_path_factory.mktemp("models") / "converted"
    shutil.copytree(talker, folder)
    tensors = {name: tensor.dequantize() for name, tensor in read_safetensors(folder / "model.safetensors").items()}
    for layer in (0, 1):
        stem = f"model.layers.{layer}.self_attn.o_proj."
        out, inner = tensors[stem + "weight"].shape
        parts = draw_fp8(np.random.default_rng(layer), out, inner, (1, inner))
        tensors |= {stem + name: array for name, array in parts.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.long
def test_run_tells_it_before_the_answer_unless_quiet(converted):
    arguments = "run", "Hi", "-m", converted, "--max-tokens", "4"
    status, _, error = run(*arguments)
    assert (status, error.splitlines()) == (0, [LINE])
    assert run(*arguments, "--quiet")[2] == ""


def test_the_description_tells_it(converted, talker):
    assert json.loads(run("models", "info", converted, "--json")[1])["converted"] == LINE
    assert "converted" not in json.loads(run("models", "info", talker, "--json")[1])


def test_the_server_tells_it_before_its_address(converted):
    with start("serve", converted, "--port", 0) as process:
        first, second = (process.stderr.readline().decode() for _ in range(2))
        process.terminate()
    assert first == f"foreword: {LINE}\n"
    assert second.startswith(f"foreword: {converted} at http://")
