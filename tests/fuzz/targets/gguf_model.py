"""Whole models as GGUF files, of every architecture: loaded and run for a few tokens."""

import tempfile
from pathlib import Path

from foreword.models.families import GGUF_FAMILIES
from foreword.models.loader import load_model
from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from models.gguf_models import ELSEWHERE, architecture_of, experts_everywhere, write
from models.recorded import TINY
from models.running import EXECUTORS, all_logits, whole
from models.tiny import random_tensors

NAMES = (
    "llama3", "mixtral", "smollm3", "qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "qwen3-next", "gemma2", "gemma3",
    "phi3", "ernie4_5", "arcee", "seed-oss", "olmo2", "glm4", "starcoder2", "granite", "granite-moe", "granite-hybrid",
    "qwen3_5", "qwen3_5-moe", "nemotron-h", "lfm2", "lfm2-moe", "gpt-oss", "deepseek-v3",
    "minicpm3", "minicpm", "llama4", "falcon-h1", "nemotron-h-latent", "glm4-moe",
    "gemma3n", "gemma4-plain", "gemma4-moe", "olmoe", "ernie4_5-moe", "ministral3", "qwen3-vl-moe",
    "dots1", "minimax-m2", "afmoe", "cohere", "cohere2", "olmo", "hunyuan", "hunyuan-moe",
    "gemma", "exaone4-full", "nemotron", "stablelm", "jais2", "gpt2", "gpt-neox", "starcoder", "falcon", "phi",
    "bitnet", "apertus", "mamba2", "mamba", "jamba", "bloom", "mpt", "exaone", "internlm2", "deepseek", "bailing",
    "bailing2", "glm", "laguna", "mellum", "cohere2-moe", "dbrx",
    "bailing-hybrid", "exaone-moe", "kimi-linear", "mimo-v2", "phimoe", "deepseek-v32", "glm-moe-dsa",
)  # fmt: skip
HAVE_DENSE_LAYERS = ("glm4-moe", "ernie4_5-moe", "exaone-moe", "cohere2-moe")  # the file has their number
ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def valid():
    assert {architecture_of(TINY[name]["config"]) for name in NAMES} == set(GGUF_FAMILIES) - ELSEWHERE
    with tempfile.TemporaryDirectory() as folder:
        return [made(name, Path(folder) / "model.gguf").read_bytes() for name in NAMES]


def parts(name):
    """The configuration, the shapes of the tensors, and further metadata of the file of a tiny model."""
    tiny = TINY[name]
    is_sparse = name.endswith(("-moe", "-next", "mellum")) and name not in HAVE_DENSE_LAYERS
    rotated = {"qwen3next.rope.dimension_count": ("u32", 4)} if name == "qwen3-next" else {}
    return {**tiny["config"], **ALL_SPARSE}, experts_everywhere(tiny, 3) if is_sparse else tiny["shapes"], rotated


def made(name, path, more=None):
    config, shapes, rotated = parts(name)
    return write(path, config, random_tensors(shapes), rotated | (more or {}))


def hostile():
    """Sizes that the tensors do not have."""
    changes = ("expert_count", 1 << 28), ("block_count", 4096), ("context_length", 1 << 28)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        return [made("mixtral", path, {f"llama.{key}": ("u32", value)}).read_bytes() for key, value in changes] + [
            made("qwen3-moe", path, {f"qwen3moe.{key}": ("u32", value) for key, value in changes}).read_bytes()
        ]


def mutate(rng, data):
    header = data.rindex(b"blk.") + 80
    return mutate_bytes(rng, data, within=rng.choice((None, 2000, header, header)))


def read(data, folder):
    path = folder / "model.gguf"
    path.write_bytes(data)
    model = load_model(path)
    model.tokenizer.decode(model.tokenizer.encode("hello"))
    text = [i % model.spec.vocab_size for i in (1, 2, 3)]
    for executor in EXECUTORS:
        all_logits(model, [text], whole([text]), executor)


TARGET = Target(valid, read, mutate, hostile)
