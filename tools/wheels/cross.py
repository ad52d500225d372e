"""Build the native module for Linux on aarch64 with zig, and put it into a copy of a wheel of this machine.

python cross.py PROJECT WHEEL BUILD TAG TARGET
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LIBC = "2.28"
TRIPLE = f"aarch64-linux-gnu.{LIBC}"


def main() -> None:
    project, wheel, build, tag, target = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        sys.argv[4],
        sys.argv[5],
    )
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    module = compiled(project, build, is_stable="abi3" in wheel.name)
    run("-m", "wheel", "unpack", "--dest", build / "wheel", wheel)
    files = next((build / "wheel").iterdir())
    mine = next((files / "foreword").glob("_native*.so"))
    mine.unlink()
    shutil.copy(module, mine.with_name(mine.name.replace("x86_64", "aarch64")))
    for libraries in files.glob("*.libs"):
        shutil.rmtree(libraries)
    run("-m", "wheel", "pack", "--dest-dir", build, files)
    packed = next(build.glob("*.whl"))
    run("-m", "wheel", "tags", "--remove", "--platform-tag", tag, packed)
    shutil.move(next(build.glob("*.whl")), target)


def compiled(project: Path, build: Path, *, is_stable: bool) -> Path:
    """Return the native module of a source tree."""
    compilers = {name: wrapper(build / f"zig-{name}", name) for name in ("c++", "cc", "ar", "ranlib")}
    options = {
        "CMAKE_BUILD_TYPE": "Release", "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": compilers["c++"], "CMAKE_AR": compilers["ar"], "CMAKE_RANLIB": compilers["ranlib"],
        "CMAKE_CXX_FLAGS": f"-I{headers(build)}", "CMAKE_MODULE_LINKER_FLAGS": "-s", "CMAKE_UNITY_BUILD": "ON",
        "CMAKE_UNITY_BUILD_BATCH_SIZE": "12", "FOREWORD_DOT_PRODUCT": "-mcpu=generic+v8_2a+dotprod",
        "Python_EXECUTABLE": sys.executable, "Python_INCLUDE_DIR": sysconfig.get_path("include"),
    }  # fmt: skip
    if is_stable:
        options |= {"SKBUILD_SABI_VERSION": "3.12", "SKBUILD_SABI_COMPONENT": "Development.SABIModule"}
    folder = build / "module"
    defined = [f"-D{name}={value}" for name, value in options.items()]
    programs = Path(sys.executable).parent
    subprocess.run([programs / "cmake", "-S", project, "-B", folder, "-G", "Ninja", *defined],
                   stdout=subprocess.DEVNULL, check=True)  # fmt: skip
    subprocess.run([programs / "cmake", "--build", folder], stdout=subprocess.DEVNULL, check=True)
    return next(folder.glob("_native*.so"))


def wrapper(path: Path, program: str) -> Path:
    """Return a program that runs one of zig's, as cmake expects it."""
    target = f" -target {TRIPLE}" if program.startswith("c") else ""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {program}{target} "$@"\n')
    path.chmod(0o755)
    return path


def headers(build: Path) -> Path:
    """Return a folder for the compiler to search: Debian's Python has one configuration per processor, and those of
    x86-64 and of aarch64 are the same in all that an extension reads.
    """
    folder = build / "include"
    here = f"x86_64-linux-gnu/python{sys.version_info[0]}.{sys.version_info[1]}/pyconfig.h"
    there = folder / here.replace("x86_64", "aarch64")
    there.parent.mkdir(parents=True)
    if Path("/usr/include", here).exists():
        shutil.copy(Path("/usr/include", here), there)
    return folder


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL, env=os.environ, check=True)


if __name__ == "__main__":
    main()
