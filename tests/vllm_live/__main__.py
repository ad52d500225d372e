"""Run the tests of this folder in an environment with vLLM, which is made once: python tests/vllm_live [for pytest …].

VLLM_ENVIRONMENT names one that exists, with vLLM and pytest in it; nothing is installed there, and this repository's
entry points are found in a temporary folder. Triton is in a folder of its own, because vLLM for the CPU behaves
differently where it finds it.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from peers.environments import DEFAULT_DIRECTORY, ensure

TRITON = "triton==3.9.0"
HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process of the test
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
}


def write_entry_points(folder: Path) -> None:
    """Write what tells vLLM of this repository's plugins, as an installation has it."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        line
        for group, plugins in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in plugins.items()))
    ]
    entry = folder / f"{project['name']}-0.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("\n".join(lines) + "\n")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder))


def run(folder: Path) -> int:
    given = os.environ.get("VLLM_ENVIRONMENT")
    python = ensure(DEFAULT_DIRECTORY, "vllm_tests") if not given else Path(given).absolute() / "bin" / "python"
    triton = python.parents[1] / "triton"
    if not given and not triton.exists():
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(triton), TRITON]
        subprocess.run(command, check=True)
    if given:
        write_entry_points(folder)
    variables = {
        **VARIABLES,
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        **({"TRITON_DIRECTORY": str(triton)} if triton.exists() else {}),
        **({"PYTHONPATH": os.pathsep.join((str(REPO / "src"), str(folder)))} if given else {}),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    tests = [] if any(Path(word.partition("::")[0]).exists() for word in sys.argv[1:]) else [str(HERE)]
    pytest = [str(python), "-m", "pytest", "-o", "filterwarnings=default", *tests, *sys.argv[1:]]
    return subprocess.run(pytest, env=environment, cwd=REPO).returncode


if __name__ == "__main__":
    sys.exit(main())
