"""Runs the tests of the kernels with instructions that the processor may lack emulated by others.

    python tools/emulate.py        or: make emulate

So the code of the level avx2_vnni runs on a machine that has only AVX2, that of avx512_bf16 and avx512_amx on one that
has only AVX-512 with VNNI. Builds with the cmake and ninja beside this Python and the system's compiler, in
build/emulate.
"""

from __future__ import annotations

import os
import subprocess
import sys

from sanitize import ROOT, build

NEEDED = {"avx2_vnni": "AVX2", "avx512_bf16": "AVX-512 with VNNI", "avx512_amx": "AVX-512 with VNNI"}
"""Of each level, the instructions that are not emulated."""


def main() -> None:
    package = build(ROOT / "build" / "emulate", CMAKE_BUILD_TYPE="Release", FOREWORD_EMULATE="ON")
    environment = os.environ | {"PYTHONPATH": str(package), "FOREWORD_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from foreword.native import native; print(*native.isa_levels())"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    levels = [level for level in NEEDED if level in listed.stdout.split()]
    for level, needed in NEEDED.items():
        if level not in levels:
            print(f"{level}: skipped: it needs {needed}; this machine or compiler has {listed.stdout.strip()}")
    if not levels:
        sys.exit(1)
    pytest = [sys.executable, "-m", "pytest", "-n", str(os.cpu_count()), "-p", "no:cacheprovider"]
    tests = [*pytest, "-k", " or ".join(levels), "tests/kernels"]
    sys.exit(subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
