"""Read facts about a model's files, for interfaces that describe models."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from foreword.errors import ModelError
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.gguf_files import files_at
from foreword.models.loader import LoadedModel, load_model
from foreword.models.registry import KNOWN, cached_path


@dataclass(frozen=True, slots=True)
class Files:
    """The facts about files. size: bytes of all files. format: "gguf" or "safetensors". modified: the latest change.
    digest: a digest of paths, sizes and times, which changes when the files change.
    """

    size: int
    format: str
    modified: str
    digest: str


NO_FILES = Files(0, "", datetime.fromtimestamp(0, UTC).isoformat(), sha256(b"").hexdigest())
"""The facts of a model that is not on this machine."""


def local_path(model: str) -> Path | None:
    """Return the file or directory of a model; None if it is not on this machine, or only in the cache of the hub."""
    if Path(model).exists():
        return Path(model)
    return cached_path(model) if model.lower() in KNOWN else None


def files_of(path: Path) -> Files:
    """Return the facts of the files of a model."""
    files = files_at(path)
    states = [(file, file.stat()) for file in files]
    text = "".join(f"{file} {state.st_size} {state.st_mtime_ns}\n" for file, state in states)
    kind = "gguf" if any(file.suffix == ".gguf" for file in files) else "safetensors"
    latest = max((state.st_mtime for _, state in states), default=0.0)
    modified = datetime.fromtimestamp(latest, UTC).isoformat()
    return Files(sum(state.st_size for _, state in states), kind, modified, sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The facts in the headers of a model's files. num_parameters: the number of all weights. quantization: the format
    of most weights.
    """

    family: str
    num_parameters: int
    quantization: str
    context_length: int
    embedding_length: int
    template: str
    capabilities: tuple[str, ...]

    @property
    def parameter_size(self) -> str:
        """Return the number of parameters as text, such as "135M" or "1.5B"."""
        count = self.num_parameters
        return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"

    def details(self, files: Files) -> dict[str, Any]:
        """Return Ollama's "details"."""
        return {
            "parent_model": "",
            "format": files.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }

    def info(self) -> dict[str, Any]:
        """Return Ollama's "model_info", under the names of GGUF."""
        return {
            "general.architecture": self.family,
            "general.parameter_count": self.num_parameters,
            f"{self.family}.context_length": self.context_length,
            f"{self.family}.embedding_length": self.embedding_length,
        }


def read_about(model: str | Path) -> About:
    """Read the headers of a model's files. Raise ModelError if Foreword's own loader does not support the model."""
    return _about(load_model(model))


def _about(loaded: LoadedModel) -> About:
    spec, tokenizer = loaded.spec, loaded.tokenizer
    sizes: dict[str, int] = {}
    for tensor in loaded.weights.values():
        name = tensor.quant.name.upper()
        sizes[name] = sizes.get(name, 0) + prod(tensor.shape)
    if isinstance(spec, EncoderSpec):
        family, can = "bert", ["embedding"]
    else:
        family = "unknown" if loaded.family is None else loaded.family.gguf or loaded.family.title.lower()
        can = ["completion"] if spec.has_logits else ["embedding"]
        can += ["tools"] * tokenizer.has_chat_template + ["insert"] * (tokenizer.infill is not None)
    return About(
        family=family,
        num_parameters=sum(sizes.values()),
        quantization=max(sizes, key=lambda name: sizes[name], default=""),
        context_length=spec.max_model_len,
        embedding_length=spec.hidden_size,
        template=tokenizer.chat_template() or "",
        capabilities=tuple(can),
    )


def about_or_none(model: str | Path) -> About | None:
    """Return the facts about a model; None if Foreword's own loader cannot read its files."""
    try:
        return read_about(model)
    except ModelError:
        return None
