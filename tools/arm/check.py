"""Holds the NEON kernels to the scalar ones without an Arm machine: cross-compiled with zig, run on an emulated one.

    python tools/arm/check.py        or: make arm

Creates an environment in build/arm. isas.cpp defines what is compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm"
LOCKED = ROOT / "tools" / "locked" / "arm.txt"

SOURCES = ROOT / "native" / "kernels"
NAMES = re.findall(r"set\(FOREWORD_(?:PRODUCT|QUAD|BASE)_SOURCES ([^)]*)\)", (SOURCES / "sources.cmake").read_text())
PER_ISA = " ".join(NAMES).split()
LEFT_OUT = ("bind", "amx")  # need Python; of another processor

# These options stand in sources.cmake, too.
EXACT = ("-ffp-contract=off", "-fno-math-errno")
ISAS = {
    isa: (*(f"-DFOREWORD_{name}={isa}" for name in ("ISA", "BASE", "QUADS")), *options, *EXACT)
    for isa, options in {"scalar": (), "neon": ("-DFOREWORD_SIMD_NEON", "-mcpu=generic+dotprod")}.items()
}


def main() -> None:
    python = BUILD / "env" / "bin" / "python"
    if Path(sys.executable) != python:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", LOCKED], check=True)
        os.execv(python, [str(python), __file__])
    from emulator import run

    sys.exit(run(build()))


def build() -> Path:
    """Build the program, statically linked, for Linux on aarch64."""
    jobs = [(SOURCES / f"{name}.cpp", isa, flags) for isa, flags in ISAS.items() for name in PER_ISA]
    others = [s for s in sorted(SOURCES.rglob("*.cpp")) if s.stem not in (*PER_ISA, *LEFT_OUT)]
    jobs += [(source, "driver", ("-DFOREWORD_ISAS=X(neon) X(scalar)",)) for source in others]
    jobs += [(Path(__file__).with_name("isas.cpp"), "driver", ())]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))
    program = BUILD / "isas"
    _zig("-static", *objects, "-o", program)
    return program


def _compile(source: Path, kind: str, flags: tuple[str, ...]) -> Path:
    target = BUILD / f"{kind}_{source.stem}.o"
    _zig("-std=c++20", "-O2", "-Wall", "-Wextra", f"-I{ROOT / 'native'}", *flags, "-c", source, "-o", target)
    return target


def _zig(*arguments: object) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", *map(str, arguments)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
