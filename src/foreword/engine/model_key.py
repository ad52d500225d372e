"""What tells a model from all others: a hash of its files, which is remembered beside what is kept of it."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

from foreword.errors import ConfigError, reason_of
from foreword.models.files import identity_of

_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".model", ".pt")
_MEMORY = "models.json"


def model_key(path: Path, memory: Path) -> bytes:
    """Return 32 bytes that only a model with the same files has: a .gguf file, or those of a directory.

    Reads all of them, once: ``memory`` is a directory where their hashes are kept, by path and `identity_of`.
    ConfigError for a model that has no files.
    """
    try:
        files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES)
        if not files:
            raise ConfigError(f"cache_dir: {path} holds no files of a model; leave it out")
        known = _read(memory / _MEMORY)
        hashes = {}
        for file in files:
            state = f"{file.resolve()} {identity_of(file.stat())}"
            if (digest := known.get(state)) is None:
                with file.open("rb") as opened:
                    digest = file_digest(opened, "sha256").hexdigest()
            hashes[state] = digest
    except OSError as error:
        raise ConfigError(f"cache_dir: {path}: cannot be read ({reason_of(error)})") from None
    if not hashes.keys() <= known.keys():
        _write(memory / _MEMORY, known | hashes)
    names = ["" if path.is_file() else file.name for file in files]
    return sha256(repr([*zip(names, hashes.values(), strict=True)]).encode()).digest()


def _read(path: Path) -> dict[str, str]:
    """Return the hashes that were kept; none if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and all(isinstance(one, str) for one in found.values()):
            return found
    return {}


def _write(path: Path, hashes: dict[str, str]) -> None:
    """Keep the hashes, as a whole or not at all. A directory that cannot be written costs the next start some time."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(hashes, file)
        os.replace(temporary, path)
