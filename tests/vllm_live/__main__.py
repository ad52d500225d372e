"""Run the tests of this folder in an environment with vLLM, which is made once: python tests/vllm_live [for pytest …].

VLLM_ENVIRONMENT names one that exists, with vLLM and pytest in it; nothing is installed there. Triton is in a folder of
its own, because vLLM for the CPU behaves differently where it finds it.
"""

import os
import subprocess
import sys
from pathlib import Path

from peers.environments import DEFAULT_DIRECTORY, ensure

TRITON = "triton==3.9.0"
HERE = Path(__file__).resolve().parent
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


def main() -> int:
    given = os.environ.get("VLLM_ENVIRONMENT")
    python = ensure(DEFAULT_DIRECTORY, "vllm_tests") if not given else Path(given).absolute() / "bin" / "python"
    triton = python.parents[1] / "triton"
    if not given and not triton.exists():
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(triton), TRITON]
        subprocess.run(command, check=True)
    variables = {
        **VARIABLES,
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        **({"TRITON_DIRECTORY": str(triton)} if triton.exists() else {}),
        **({"PYTHONPATH": str(HERE.parents[1] / "src")} if given else {}),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    tests = [] if any(Path(word.partition("::")[0]).exists() for word in sys.argv[1:]) else [str(HERE)]
    pytest = [str(python), "-m", "pytest", "-o", "filterwarnings=default", *tests, *sys.argv[1:]]
    return subprocess.run(pytest, env=environment, cwd=HERE.parents[1]).returncode


if __name__ == "__main__":
    sys.exit(main())
