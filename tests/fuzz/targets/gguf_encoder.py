"""Whole encoders as GGUF files, of every architecture: loaded, and run for a text and for a pair of texts."""

import tempfile
from pathlib import Path

from foreword import LLM
from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from models.encoder_gguf import bytes_of, write_encoder_gguf
from models.pooling_models import POOLING
from models.tiny import random_tensors

NAMES = {
    "bert": 1,
    "roberta": 3,
    "nomic-bert": 2,
    "jina-embeddings-v3": 1,
    "distilbert": 1,
    "modernbert": 0,
    "roberta-classifier": 4,
}
"""Each with its pooling."""
VOCABULARY = bytes_of([chr(0x100 + i) for i in range(48)], bos=1, eos=2, unknown=3, padding=0)


def made(name, **more):
    tiny = POOLING[name]
    labels = {"classifier.output_labels": ("[str]", ["a", "b", "c"])} if "classifier" in name else {}
    with tempfile.TemporaryDirectory() as folder:
        path, tensors = Path(folder) / "model.gguf", random_tensors(tiny["shapes"])
        options = {"pooling": NAMES[name], **labels, **more}
        return write_encoder_gguf(path, tiny["config"], tensors, VOCABULARY, **options).read_bytes()


def valid():
    return [made(name) for name in NAMES]


def hostile():
    """Sizes that the tensors do not have."""
    changes = ("block_count", 4096), ("context_length", 1 << 28), ("attention.head_count", 3), ("embedding_length", 0)
    return [made(name, **{key: ("u32", value)}) for name in ("bert", "modernbert") for key, value in changes]


def mutate(rng, data):
    return mutate_bytes(rng, data, within=rng.choice((None, 2000, data.rindex(b"blk.") + 80)))


def read(data, folder):
    path = folder / "model.gguf"
    path.write_bytes(data)
    for executor in ("numpy", "native"):
        with LLM(str(path), executor=executor) as llm:
            llm.encode([[1, 5, 2], "hello"])


TARGET = Target(valid, read, mutate, hostile)
