"""The SHA-256 of files, computed once for each of their identities, for everything that is kept of a model.

digests/ID    of the file with the identity whose hash is ID; the time of its last change is that of the last use
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from foreword.errors import ConfigError, ModelError, reason_of
from foreword.hashes import sha256
from foreword.models.files import ModelFile, identity_of
from foreword.models.gguf_files import files_at
from foreword.models.registry import cache_dir
from foreword.native import NATIVE_FILE, native
from foreword.ownership import is_own, open_for_writing, open_regular

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST = 65  # characters of a record that are read: those of a digest, and one more
_DAYS_KEPT = 90  # digests that are not used are kept so long
_YOUNG = 2 * 10**9  # nanoseconds: see `identity_of`
_SUFFIXES = (".gguf", ".safetensors", ".bin", ".json", ".model", ".pt")  # the endings of the files of a model


class Digests:
    """Digests of files, remembered in the folder "digests" of `cache_dir`, which is made if it is missing.

    A folder that cannot be written costs the next start the time of reading the files.
    """

    def __init__(self) -> None:
        self.folder = cache_dir() / "digests"

    def sha256_of(self, file: ModelFile) -> str:
        """Return the digest of a file, in hexadecimal. Raise ModelError if it changes meanwhile."""
        record = self.folder / sha256(file.identity.encode()).hexdigest()[:32]
        with contextlib.suppress(OSError, ValueError):  # ValueError: what it has is not text
            with os.fdopen(open_regular(record), encoding="utf-8") as kept:
                known = kept.read(_LONGEST)
            if _DIGEST.fullmatch(known) and is_own(record.stat()) and is_own(self.folder.stat()):
                with contextlib.suppress(OSError):  # a folder that cannot be written
                    os.utime(record)
                return known
        digest = file.sha256()
        if not is_young(file.identity):
            with contextlib.suppress(OSError):
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if is_own(self.folder.stat()):
                    write_private(record, digest)
        return digest

    def of_files(self, files: Iterable[tuple[str, Path]]) -> bytes:
        """Return 32 bytes that only files with these names and equal contents have. Raise ModelError as `sha256_of`."""
        found = [(name, self.sha256_of(ModelFile(path, 0))) for name, path in files]
        return sha256(repr(found).encode()).digest()

    def prune(self) -> None:
        """Forget digests that have not been used for long."""
        oldest = time.time() - _DAYS_KEPT * 86400
        for record in self.folder.glob("*"):
            with contextlib.suppress(OSError):
                if record.stat().st_mtime < oldest:
                    record.unlink()


def native_digest() -> str:
    """Return the digest of the native module that this process runs.

    Raise ModelError if its file is another one now.
    """
    code = ModelFile(Path(str(native.__file__)), 0)
    if code.identity != identity_of(NATIVE_FILE):
        raise ModelError(f"{code.path}: was replaced since this process started. Start it again")
    return Digests().sha256_of(code)


def model_key(path: Path) -> bytes:
    """Return 32 bytes that only a model with the same files has: a .gguf file with the other parts of a split model, or
    those of a directory.

    Raise ConfigError for a model that has no files, ModelError as `Digests.sha256_of`.
    """
    if path.is_file():
        return Digests().of_files(("", file) for file in files_at(path))
    try:
        files = sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES)
    except OSError as error:
        raise ConfigError(f"cache_dir: {path}: cannot be read ({reason_of(error)})") from None
    if not files:
        raise ConfigError(f"cache_dir: {path} holds no files of a model; leave it out")
    return Digests().of_files((file.name, file) for file in files)


def is_young(identity: str) -> bool:
    """Return whether a file changed so recently that a further change might keep its identity."""
    changed = max(map(int, identity.split()[-2:]))
    return time.time_ns() - changed < _YOUNG


def write_private(path: Path, text: str) -> None:
    """Write a small file that only this user may read, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(open_for_writing(temporary, mode=0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
