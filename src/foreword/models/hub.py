"""Models of the Hugging Face hub, kept in the hub's own cache. Needs the extra ``foreword[hub]``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from foreword.errors import ModelError
from foreword.installation import install
from foreword.models import registry
from foreword.models.gguf_names import mmproj_of, models_among, part_names, quant_of

DIRECTORY = ("*.json", "*.safetensors", "*.jinja", "tiktoken.model")
SEARCH_TIMEOUT = 10.0
"""Seconds until a search gives up a hub that does not answer."""


class HubId(NamedTuple):
    """``org/model[@REVISION][:QUANT]``. revision: a branch, tag or commit; None: the main branch."""

    repository: str
    revision: str | None
    quant: str

    @classmethod
    def of(cls, name: str) -> HubId:
        """Parse a name. Raise ModelError for an empty revision or format."""
        place, colon, quant = name.partition(":")
        repository, at, revision = place.partition("@")
        if (at and not revision) or (colon and not quant) or "@" in quant:
            raise _error(
                name, "is not a hub id. Give org/model, org/model@REVISION, org/model:FORMAT or both, in this order"
            )
        return cls(repository, revision or None, quant)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the hub. formats: "gguf", "safetensors" or both. downloads: of the last 30 days. gated: its terms
    must be accepted on the hub before it can be fetched.
    """

    repository: str
    formats: tuple[str, ...]
    downloads: int
    gated: bool


def search_hub(words: str, limit: int) -> list[HubModel]:
    """Return the repositories with these words in their id that have weights which Foreword may read, the most
    downloaded first, at most ``limit``. Raise ModelError if the hub cannot be asked.
    """
    hub = _library("a search of the hub")
    utils = import_module("huggingface_hub.utils")
    asked = {"search": words, "sort": "downloads", "limit": 5 * limit}
    headers = {} if (token := hub.get_token()) is None else {"authorization": f"Bearer {token}"}
    try:  # not `list_models`, which asks again for half a minute where there is no network
        url = f"{hub.HfApi().endpoint}/api/models"
        answer = utils.get_session().get(url, params=asked, headers=headers, timeout=SEARCH_TIMEOUT)
        utils.hf_raise_for_status(answer)
        found = [_hub_model(facts) for facts in answer.json()]
    except Exception as error:  # network, an offline mode, an answer of another form
        raise ModelError(f"the hub was not searched: {_first_line(error)}. Check the network") from None
    return [model for model in found if model.formats][:limit]


def _hub_model(facts: Mapping[str, Any]) -> HubModel:
    formats = tuple(name for name in ("gguf", "safetensors") if name in facts.get("tags", ()))
    return HubModel(str(facts["id"]), formats, int(facts.get("downloads", 0)), bool(facts.get("gated")))


def _library(subject: str) -> Any:
    """Return huggingface_hub. Raise ModelError where it is not installed. subject: what needs it."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(f"{subject} needs huggingface_hub. {install('hub')}") from None
    return huggingface_hub


def from_hub(name: str) -> Path:
    """Return the directory of ``org/model``, or the .gguf file of ``org/model:QUANT``; fetch them if need be.

    ``org/model@REVISION`` is the model at a branch, tag or commit. A commit pins it: its files never change.
    All parts of a split model are fetched, and beside them the .gguf file of an encoder of images if there is one for
    the model: see `mmproj_of`.
    Without QUANT, a repository of .gguf files alone gives its Q4_K_M, or its only file. Without a network, what is
    cached is used. ModelError names the available files, and the bytes that a full disk lacks.
    """
    wanted = HubId.of(name)
    repository, revision = wanted.repository, wanted.revision
    try:
        hub = _library("a hub id")
    except ModelError as error:
        raise _error(name, str(error)) from None
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except Exception as error:  # network, authentication, an unknown id: many exception types
        return _cached(hub, name, wanted, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    chosen = _chosen(name, list(sizes), wanted.quant)
    patterns = list(DIRECTORY)
    if chosen:
        parts = part_names(chosen)
        if missing := next((part for part in parts if part not in sizes), None):
            raise _error(name, f"has no {missing}, one of {len(parts)} files of a split model. Give another one")
        patterns = [escape(file) for file in (*parts, mmproj_of(chosen, sizes)) if file]
    _check_space(hub, name, wanted, sizes, patterns)
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise _error(name, f"the hub reports: {_first_line(error)}. Check the network and the disk") from None
    return folder / (chosen or "")


def _cached(hub: Any, name: str, wanted: HubId, error: Exception) -> Path:
    """Return what is on this machine, after the hub could not be asked; ModelError with the reason if that is
    nothing.
    """
    try:
        folder = Path(hub.snapshot_download(wanted.repository, revision=wanted.revision, local_files_only=True))
    except Exception:
        raise _error(name, f"the hub reports: {_first_line(error)}. Check the id and the network") from None
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return folder / (_chosen(name, files, wanted.quant) or "")


def _chosen(name: str, files: list[str], quant: str) -> str | None:
    """Return the .gguf file to use, of a split model the first; None for the directory of safetensors."""
    gguf = models_among(files)
    found = {file: known for file in gguf if (known := quant_of(file))}
    if not quant:
        if not gguf or any(file.endswith(".safetensors") for file in files):
            return None
        if len(gguf) == 1:
            return gguf[0]
    wanted = (quant or "Q4_K_M").lower()
    matches = [file for file, known in found.items() if known == wanted]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(sorted({known.upper() for known in found.values()})) or "none"
    reason = f"has {len(matches)} .gguf files of {wanted.upper()}; its formats are {known}"
    raise _error(name, f"{reason}. Give one as {name.partition(':')[0]}:FORMAT")


def _check_space(hub: Any, name: str, wanted: HubId, sizes: Mapping[str, int], patterns: list[str]) -> None:
    missing = [
        file
        for file in sizes
        if any(fnmatch(file, pattern) for pattern in patterns)
        and not isinstance(hub.try_to_load_from_cache(wanted.repository, file, revision=wanted.revision), str)
    ]
    need = sum(sizes[file] for file in missing)
    cache = Path(hub.constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if need > free:
        raise _error(name, f"{need} bytes are needed and {free} are free in {cache}. Make room, or set HF_HOME")


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return re.sub(r"^\[Errno -?\d+\] ", "", line)


def _error(name: str, reason: str) -> ModelError:
    return ModelError(f"{name}: {reason}, or give a local path; known names are {', '.join(registry.KNOWN)}")
