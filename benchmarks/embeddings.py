"""Sentences per second of all-MiniLM-L6-v2 in Foreword, sentence-transformers and onnxruntime, on the same texts.

    python benchmarks/embeddings.py                          # creates the environment, then runs
    python benchmarks/embeddings.py --threads 1 --rounds 9

The engines take turns in one process, each with its own batching: Foreword takes the whole list; sentence-transformers
sorts it and pads batches of 32; onnxruntime gets the same batches here, of the graph that torch exports. All compute in
float32, and their vectors must be equal to a cosine of 0.99999. The processor time of a round is that of all threads:
on a machine with other work, compare its medians.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peers.environments import run_inside

LENGTHS = (5, 8, 12, 16, 24, 32, 48, 64, 100)  # words, equally often
BATCH = 32
Embed = Callable[[list[str]], Any]  # it gives a vector for each text


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentences per second of an embedding model, in three engines.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", type=Path, help="directory of the environments")
    args = parser.parse_args()
    threads = str(args.threads)
    run_inside(args.peers, "embeddings", variables={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads})
    words = " ".join(pydoc_data.topics.topics.values()).split()
    draw = random.Random(0)
    lengths = [draw.choice(LENGTHS) for _ in range(args.texts)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    run([" ".join(words[at : at + length]) for at, length in zip(starts, lengths, strict=True)], args)


def run(texts: list[str], args: argparse.Namespace) -> None:
    """Print a line per engine, in JSON."""
    embed, folder = foreword(args.threads)
    engines = {
        "foreword": embed,
        "sentence-transformers": sentence_transformers(folder, args.threads),
        "onnxruntime": onnxruntime(folder, args.threads),
    }
    vectors = {name: np.asarray(embed(texts)) for name, embed in engines.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, embed in engines.items():
            time.sleep(0.1)  # until the threads of the other engine have stopped to spin
            begin = time.perf_counter(), time.process_time()
            embed(texts)
            seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    for name, measured in seconds.items():
        cosine = float((vectors[name] * vectors["foreword"]).sum(1).min())
        assert cosine > 0.99999, f"{name}: cosine {cosine}"
        wall, processor = zip(*measured, strict=True)
        line = {
            "engine": name,
            "version": version(name),
            "threads": args.threads,
            "texts": len(texts),
            "best_sentences_s": round(len(texts) / min(wall)),
            "median_sentences_s": round(len(texts) / statistics.median(wall)),
            "median_processor_s": round(statistics.median(processor), 3),
            "least_cosine": round(cosine, 8),
        }
        print(json.dumps(line), flush=True)


def foreword(threads: int) -> tuple[Embed, Path]:
    """Return the engine, and the model's directory."""
    from foreword import LLM, PoolingParams
    from foreword.models import registry

    params = PoolingParams(truncate_prompt_tokens=-1)
    llm = LLM(str(registry.pull("all-minilm-l6-v2").parent), num_threads=threads)
    return lambda texts: llm.embed(texts, params, progress=False), llm.model.path


def sentence_transformers(folder: Path, threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH, normalize_embeddings=True)


def onnxruntime(folder: Path, threads: int) -> Embed:
    import onnxruntime
    import tokenizers

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(exported(folder), options)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        out = np.empty((len(texts), 384), np.float32)
        for start in range(0, len(texts), BATCH):
            batch = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in batch])
            ids, mask = (np.array([getattr(e, name) for e in encoded]) for name in ("ids", "attention_mask"))
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            states = session.run(None, given)[0]
            mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            out[batch] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return out

    return embed


def exported(folder: Path) -> bytes:
    """Return the encoder as an ONNX graph with free sizes."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.ones(2, 8, dtype=torch.long)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        torch.onnx.export(
            States(),
            (ids, ids, ids * 0),
            str(path),
            input_names=names,
            output_names=["states"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in [*names, "states"]},
            opset_version=17,
            dynamo=False,
        )
        return path.read_bytes()


if __name__ == "__main__":
    main()
