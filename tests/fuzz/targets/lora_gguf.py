"""GGUF files of LoRA adapters."""

from foreword.models.loader import load_model
from foreword.models.lora import read_lora
from fuzz.mutations import mutate_bytes
from fuzz.target import Target
from models import gguf_writer
from models.lora_files import gguf_parts, random_factors
from models.recorded import TINY, make

MODEL = TINY["llama3"]


def file(ends, **changes):
    metadata, tensors = gguf_parts(MODEL["config"], random_factors(MODEL["shapes"], ends=ends))
    return gguf_writer.assemble(metadata | changes, tensors)[0]


def valid():
    return [file(("q_proj", "k_proj")), file(("up_proj",))]


def hostile():
    return [file(("q_proj",), **{"adapter.lora.alpha": ("f32", alpha)}) for alpha in (float("inf"), 3e38, -1.0, 1e-45)]


def mutate(rng, data):
    return mutate_bytes(rng, data, within=rng.choice((None, 24, 1000)))


def read(data, folder):
    base = folder / "llama3"
    model = load_model(base if base.exists() else make(folder, "llama3"))
    path = folder / "adapter.gguf"
    path.write_bytes(data)
    read_lora(path, model.spec, model.family)


TARGET = Target(valid, read, mutate, hostile)
