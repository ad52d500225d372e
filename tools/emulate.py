"""Runs the tests of the kernels with the instructions of bf16 and of AMX emulated by others of AVX-512.

    python tools/emulate.py        or: make emulate

So the code of the levels avx512_bf16 and avx512_amx runs on a machine that has only AVX-512 with VNNI. Builds with the
cmake and ninja beside this Python and the system's compiler, in build/emulate.
"""

from __future__ import annotations

import os
import subprocess
import sys

from sanitize import ROOT, build

LEVELS = ("avx512_amx", "avx512_bf16")


def main() -> None:
    package = build(ROOT / "build" / "emulate", CMAKE_BUILD_TYPE="Release", FOREWORD_EMULATE="ON")
    environment = os.environ | {"PYTHONPATH": str(package), "FOREWORD_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from foreword.native import native; print(*native.isa_levels())"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if not set(LEVELS) <= set(listed.stdout.split()):
        sys.exit(f"emulation needs AVX-512 with VNNI; this machine or compiler has {listed.stdout.strip()}")
    pytest = [sys.executable, "-m", "pytest", "-n", str(os.cpu_count()), "-p", "no:cacheprovider"]
    tests = [*pytest, "-k", " or ".join(LEVELS), "tests/kernels"]
    sys.exit(subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
