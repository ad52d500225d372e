"""Runs the tests of the native module, and mixed traffic, in builds that check memory, undefined behaviour and races.

    python tools/sanitize.py        or: make sanitize

Builds the kernels that this processor runs, in build/sanitize-*, with the cmake and ninja beside this Python and the
system's compiler. Memory that is not freed is not reported: the interpreter frees much of its own at no time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from foreword import _native

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent
CXX = os.environ.get("CXX", "c++")
# Name of the build → (sanitizers, runtime library, options, growth of memory in mixed traffic in MiB). Freed memory
# that the address sanitizer keeps would take long to reach its default size, and count as growth. The thread sanitizer
# remembers the last accesses to each address, in several times the memory of the program.
SANITIZERS = {
    "address": (
        "address,undefined",
        "asan",
        {
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        16,
    ),
    "thread": (
        "thread",
        "tsan",
        {"TSAN_OPTIONS": f"die_after_fork=0:halt_on_error=1:suppressions={ROOT / 'tools/sanitize_thread.txt'}"},
        256,
    ),
}
# Level of the kernels → the option of the build that says whether the compiler has its instructions.
OF_COMPILER = {
    "avx2_vnni": "FOREWORD_COMPILER_HAS_AVX_VNNI",
    "avx512_vnni": "FOREWORD_COMPILER_HAS_VNNI",
    "avx512_bf16": "FOREWORD_COMPILER_HAS_BF16",
    "avx512_amx": "FOREWORD_COMPILER_HAS_AMX",
}
TESTS = (
    "tests/kernels",
    *(f"tests/sampling/test_{name}.py" for name in ("native_rows", "token_counts", "sampler")),
    *(
        f"tests/batch/test_{name}.py"
        for name in (
            "bulk_rows",
            "hostile_callers",
            "random_traces",
            "refused_steps",
            "sampling_metadata",
            "vllm_apply",
        )
    ),
)
# The default model takes long, and the long contexts add no path to the shorter ones.
DESELECTED = ("-m", "not model", "-k", "not long_context and not error_of_a_format and not loops")


def main() -> None:
    left_out = {option: "0" for level, option in OF_COMPILER.items() if level not in _native.isa_levels()}
    for name, (sanitizers, library, options, most_growth) in SANITIZERS.items():
        print(f"{sanitizers}:", flush=True)
        folder = ROOT / "build" / f"sanitize-{name}"
        check_compiler(folder, sanitizers)
        package = build(folder, FOREWORD_SANITIZE=sanitizers, **left_out)
        run(package, f"lib{library}", options, most_growth)


def check_compiler(folder: Path, sanitizers: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [CXX, f"-fsanitize={sanitizers}", "-x", "c++", "-", "-o", folder / "empty"]
    if subprocess.run(command, input=b"int main() {}", capture_output=True, check=False).returncode:
        sys.exit(f"{CXX} cannot build with -fsanitize={sanitizers}: install its sanitizers, or set CXX to a compiler "
                 "that has them")  # fmt: skip


def build(folder: Path, **cmake_options: str) -> Path:
    """Return a folder to import the package from, with the native module built with these options."""
    cmake, ninja = TOOLS / "cmake", TOOLS / "ninja"
    options = {
        "CMAKE_MAKE_PROGRAM": ninja, "CMAKE_CXX_COMPILER": shutil.which(CXX), "Python_EXECUTABLE": sys.executable,
        **cmake_options,
    }  # fmt: skip
    defined = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run([cmake, "-S", ROOT, "-B", folder, "-G", "Ninja", *defined], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([cmake, "--build", folder], check=True)
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in folder.glob("_native*.so"):
        shutil.copy(module, package / "foreword")
    return package


def run(package: Path, library: str, options: dict[str, str], most_growth: int) -> None:
    """Run the tests and the traffic, with the sanitizer's runtime loaded before the interpreter."""
    preload = [_library(f"{name}.so") for name in (library, "libstdc++")]
    environment = os.environ | options | {
        "LD_PRELOAD": " ".join(preload), "PYTHONPATH": str(package), "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1", "FOREWORD_NUM_THREADS": "2",
    }  # fmt: skip
    tests = ["-m", "pytest", "-n", str(os.cpu_count()), "-p", "no:cacheprovider", *DESELECTED, *TESTS]
    traffic = ["tests/storms/soak.py", "--steps", "8000", "--most-growth", str(most_growth)]
    for arguments in (tests, traffic):
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            sys.exit(done.returncode)


def _library(name: str) -> str:
    found = subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
