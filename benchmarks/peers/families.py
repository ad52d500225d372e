"""Decode and prefill of Foreword and of llama.cpp with the same GGUF file of a small random model of each family.

    PYTHONPATH=tests:benchmarks python benchmarks/peers/families.py --only "LFM2,Qwen3.5"

It makes the files (8 bit, Q8_0), which needs torch and transformers, and asks the engines in turns. A result, one per
line: family, weight_format (Foreword's), work, tok_s and llama_cpp_tok_s of processor time, ratio.

    PYTHONPATH=tests:benchmarks python benchmarks/peers/families.py --write lfm2-350m-random FOLDER

writes the file of a model of random weights with the sizes of a published one, for `run.py --gguf`, and ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import environments
import numpy as np
from parts.family_shapes import COMMON, SHAPES, WHOLE

from foreword.models.quants import Quant
from models import gguf_models, gguf_writer
from models.tiny import random_tensors

HERE = Path(__file__).resolve().parent

ONLY = "Llama,Gemma 3,Gemma 4,Qwen3 MoE,Granite MoE,Granite 4 H,Falcon-H1,Qwen3.5,LFM2"
FORMATS = ("auto", "int8")


def checkpoint(family: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the configuration of a family as transformers writes it, and the shapes of the tensors it saves."""
    import transformers
    from safetensors import safe_open

    model_type, keys = SHAPES.get(family) or WHOLE[family]
    values = {**COMMON, **keys, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(model_type, **values)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        shapes = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, "np") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return json.loads((Path(folder) / "config.json").read_text()), shapes


def write(family: str, path: Path) -> None:
    """Write a GGUF file of random weights."""
    config, shapes = checkpoint(family)
    tensors = {}
    for name, array in gguf_models.gguf_tensors(config, random_tensors(shapes)).items():
        is_float = array.ndim < 2 or array.shape[-1] % 32 or any(part in name for part in gguf_models.AS_FLOATS)
        quant, data = (Quant.F32, gguf_writer.f32(array)) if is_float else (Quant.Q8_0, q8_0(array))
        tensors[name] = (quant, array.shape, data.ravel())
    with path.open("wb") as file:
        for field, data in gguf_writer.parts(metadata(config), tensors):
            file.write(data if field != "padding" else bytes(-file.tell() % 32))


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of the file, with the keys that llama.cpp demands and without those it refuses."""
    found = dict(gguf_models.metadata(config))
    name = found["general.architecture"][1]
    if name.startswith("qwen35"):
        found[f"{name}.rope.dimension_sections"] = ("[i32]", [6, 5, 5, 0])
    if name == "gpt-oss":
        found[f"{name}.expert_feed_forward_length"] = ("u32", config["intermediate_size"])
    if not found.get(f"{name}.expert_count", ("u32", 0))[1]:
        found.pop(f"{name}.expert_used_count", None)
        found.pop(f"{name}.expert_feed_forward_length", None)
    return found


def q8_0(array: np.ndarray) -> np.ndarray:
    blocks = array.reshape(-1, 32)
    scale = np.maximum(np.abs(blocks).max(1, keepdims=True) / 127, 1e-6).astype(np.float16)
    numbers = np.rint(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], axis=1)


class Worker:
    def __init__(self, python: Path | str, engine: str, path: Path) -> None:
        command = [str(python), str(HERE / "family_worker.py"), engine, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args}: the engine ended")
        return line

    def rates(self, seed: int) -> dict[str, float]:
        print(seed, file=self.process.stdin, flush=True)
        return json.loads(self.line())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=ONLY, help="families, separated by commas")
    parser.add_argument("--turns", type=int, default=2, help="measured runs of each engine, after one to warm up")
    parser.add_argument("--peers", type=Path, default=environments.DEFAULT_DIRECTORY)
    parser.add_argument("--write", nargs=2, metavar=("MODEL", "FOLDER"), help=f"one of {', '.join(WHOLE)}")
    args = parser.parse_args()
    if args.write:
        model, folder = args.write
        write(model, Path(folder) / f"{model}-q8_0.gguf")
        return
    llama_cpp = environments.ensure(args.peers, "xllamacpp")
    for family in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write(family, path)
            workers = {"llama.cpp": Worker(llama_cpp, "llama.cpp", path)}
            workers |= {one: Worker(sys.executable, one, path) for one in FORMATS}
            best: dict[str, dict[str, float]] = {}
            for turn in range(args.turns + 1):
                for name, worker in workers.items():
                    rates = worker.rates(turn)
                    if turn:
                        before = best.setdefault(name, rates)
                        best[name] = {work: max(rate, before[work]) for work, rate in rates.items()}
            for worker in workers.values():
                worker.process.kill()
                worker.process.wait()
        for one in FORMATS:
            for work, rate in best[one].items():
                theirs = best["llama.cpp"][work]
                result = {"family": family, "weight_format": one, "work": work, "tok_s": round(rate, 1),
                          "llama_cpp_tok_s": round(theirs, 1), "ratio": round(rate / theirs, 3)}  # fmt: skip
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
