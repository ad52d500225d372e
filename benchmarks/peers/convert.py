"""Convert the default model's GGUF file for each peer, from the same dequantised weights and without a network.

python convert.py GGUF OUTPUT_DIRECTORY WHAT…       in the environment `convert`

hf-fp32, hf-bf16          directories for transformers and vLLM
vllm-w8a8                 compressed-tensors: int8 weights per output channel, activations per token; head in bf16
openvino-fp32|int8|int4   OpenVINO IR through optimum-intel (int4: groups of 64, symmetric)
onnxruntime-int4|fp32     through onnxruntime-genai's model builder
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    gguf, out = Path(sys.argv[1]), Path(sys.argv[2])
    for what in sys.argv[3:]:
        make(gguf, out, what)


def make(gguf: Path, out: Path, what: str) -> Path:
    """The path out/what, which is created under a temporary name and renamed when complete."""
    if not (out / what).exists():
        partial = out / f"{what}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        kind, _, weights = what.partition("-")
        CONVERT[kind](gguf, out, weights, partial)
        partial.rename(out / what)
    return out / what


def hf(gguf: Path, out: Path, weights: str, target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=DTYPES[weights])
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def vllm(gguf: Path, out: Path, weights: str, target: Path) -> None:
    source = make(gguf, out, "hf-bf16")
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    quantized = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        quantized[name] = (tensor.float() / scale).round().clamp(-128, 127).to(torch.int8)
        quantized[name.replace(".weight", ".weight_scale")] = scale.to(torch.bfloat16)
    save_file(quantized, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
            }
        },
    }
    (target / "config.json").write_text(json.dumps(config, indent=1))


def openvino(gguf: Path, out: Path, weights: str, target: Path) -> None:
    form = {
        "fp32": ["--weight-format", "fp32"],
        "int8": ["--weight-format", "int8", "--sym"],
        "int4": ["--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0"],
    }[weights]
    export = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--model", str(make(gguf, out, "hf-fp32")), "--task", "text-generation-with-past"]
    subprocess.run([*export, *task, *form, str(target)], check=True)


def onnxruntime(gguf: Path, out: Path, weights: str, target: Path) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(make(gguf, out, "hf-fp32"))]
    command += ["-o", str(target), "-p", weights, "-e", "cpu", "-c", str(out / "builder-cache")]
    subprocess.run([*command, "--extra_options", "int4_accuracy_level=4"], check=True)


CONVERT = {"hf": hf, "vllm": vllm, "openvino": openvino, "onnxruntime": onnxruntime}

if __name__ == "__main__":
    main()
