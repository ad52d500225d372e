"""Static analysis of the kernels' inner loops by llvm-mca: cycles and port pressure on processors that are not at hand.

    python tools/throughput.py [PROCESSOR …]        or: make throughput

Compiles attention.cpp and linear.cpp to assembly with FOREWORD_THROUGHPUT, which marks the bodies of loops
(FW_LOOP_BEGIN in native/kernels/simd/simd.h), and simulates the largest register tile of each loop as if its data were
in the first-level cache. The compiler is that of the build, for Arm zig (`make arm` installs it). LLVM_MCA: the
program; default the newest one found.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "throughput"
KERNELS = ROOT / "native" / "kernels"
SOURCES = ("attention", "linear")
OLDEST = 19  # version of LLVM with models of these processors
PROCESSORS = {
    "znver3": "avx2",
    "alderlake": "avx2_vnni",
    "znver4": "avx512_bf16",
    "znver5": "avx512_bf16",
    "icelake-server": "avx512_vnni",
    "sapphirerapids": "avx512_bf16",
    "neoverse-v2": "neon",
}
"""Processors, and the instruction-set level whose code they run. llvm-mca has no model of AMX tiles."""
FORMATS = re.findall(r"^  (\w+),", (KERNELS / "formats.h").read_text().partition("enum class Format")[2], re.M)
PLANES = 16  # the kind of a linear loop: its format + 16 for activations in two planes
MARK = re.compile(r"LLVM-MCA-(BEGIN|END) (\w+):(\d+):(\d+):(\d+)")
BRANCH = re.compile(r"\s+(j\w+|b|b\.\w+|cbn?z|tbn?z|ret|call|bl)\s")


class MissingError(Exception):
    """A program that the analysis needs, by its name and how to get it."""


@dataclass(frozen=True, order=True)
class Loop:
    """``vectors`` × ``rows`` registers of sums. body: the instructions of ``copies`` iterations, with their branch."""

    name: str
    vectors: int
    rows: int
    copies: int
    body: tuple[str, ...]


def main(wanted: list[str]) -> int:
    if unknown := set(wanted) - set(PROCESSORS):
        print(f"unknown processors: {', '.join(sorted(unknown))}; known: {', '.join(PROCESSORS)}")
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    known: dict[str, list[Loop]] = {}
    analysed = 0
    for processor in wanted or PROCESSORS:
        level = PROCESSORS[processor]
        try:
            options = [f"-mtriple={'aarch64' if level == 'neon' else 'x86_64'}", f"-mcpu={processor}"]
            mca = find_mca(options)
            if level not in known:
                known[level] = largest([loop for source in SOURCES for loop in read(assembly(source, level))])
            report(processor, simulate([mca, *options], known[level]), known[level])
            analysed += 1
        except MissingError as error:
            print(f"{processor}: skipped: {error}\n")
    return 0 if analysed else 1


def find_mca(options: list[str]) -> str:
    """Return the newest llvm-mca with a model of the processor."""
    given = os.environ.get("LLVM_MCA")
    names = [given] if given else [f"llvm-mca-{version}" for version in range(29, OLDEST - 1, -1)] + ["llvm-mca"]
    for path in filter(None, map(shutil.which, names)):
        version = re.search(r"version (\d+)", _output(path, "--version"))
        if version is None or int(version[1]) < OLDEST:
            continue
        if "not a recognized" not in _output(path, *options):
            return path
        raise MissingError(f"{path} has no model of this processor: install a newer LLVM, or set LLVM_MCA")
    raise MissingError(f"llvm-mca {OLDEST} or newer is missing: install it (Debian: llvm-{OLDEST}), or set LLVM_MCA")


def _output(*command: str) -> str:
    ran = subprocess.run(
        command, input="nop\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ran.stdout


def assembly(source: str, level: str) -> str:
    """Compile the source for the level."""
    out = BUILD / f"{level}_{source}.s"
    command = arm_command(source) if level == "neon" else x86_command(source, level)
    subprocess.run([*command, "-DFOREWORD_THROUGHPUT", "-S", "-o", str(out)], cwd=BUILD, check=True)
    return out.read_text()


def x86_command(source: str, level: str) -> list[str]:
    """Return the build's own command without its outputs."""
    for program in ("cmake", "ninja"):
        if not shutil.which(program):
            raise MissingError(f"{program} is missing: run `make throughput`, which installs it, or put it on the PATH")
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, *options], check=True, stdout=subprocess.DEVNULL)
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if Path(entry["file"]) == KERNELS / f"{source}.cpp" and f"foreword_kernels_{level}.dir" in entry["command"]:
            words = shlex.split(entry["command"])
            if Path(words[0]).name == "ccache":
                del words[0]
            at = words.index("-o")
            return [word for i, word in enumerate(words) if i not in (at, at + 1) and word != "-c"]
    raise MissingError(f"the compiler does not build {level}: use a newer one")


def arm_command(source: str) -> list[str]:
    sys.path.insert(0, str(ROOT / "tools" / "arm"))
    from check import BUILD as ARM
    from check import ISAS

    python = ARM / "env" / "bin" / "python"
    if not python.exists():
        raise MissingError("zig is missing, which compiles for Arm: run `make arm`, which installs it")
    zig = [
        str(python),
        "-m",
        "ziglang",
        "c++",
        "-target",
        "aarch64-linux-musl",
        "-g0",
        "-Wno-unused-command-line-argument",
    ]
    return [*zig, "-std=c++20", "-O3", f"-I{ROOT / 'native'}", *ISAS["neon"], str(KERNELS / f"{source}.cpp")]


def read(text: str) -> list[Loop]:
    """The blocks without branches that have both marks of a loop: instructions that the compiler moved are in them."""
    found: list[Loop] = []
    marks: list[tuple[str, ...]] = []
    code: list[str] = []
    for line in text.splitlines():
        if mark := MARK.search(line):
            marks.append(mark.groups())
            continue
        if instruction := re.match(r"\s+[a-z{].*?(?=//|$)", line):
            code.append(instruction[0].strip())
        if BRANCH.match(line) or re.match(r"\.?\w+:", line):
            begins = [loop for begin, *loop in marks if begin == "BEGIN"]
            ends = [loop for end, *loop in marks if end == "END"]
            if begins and begins == ends and len(set(map(tuple, begins))) == 1:
                name, kind, rows, vectors = begins[0]
                if name == "linear":
                    name += f"_{FORMATS[int(kind) % PLANES]}" + "_15bit" * (int(kind) >= PLANES)
                found.append(Loop(name, int(vectors), int(rows), len(begins), tuple(code)))
            marks, code = [], []
    return found


def largest(loops: list[Loop]) -> list[Loop]:
    """Return, sorted, the loop with the most rows for each name and number of vectors, in its shortest form."""
    best: dict[tuple[str, int], Loop] = {}
    for loop in loops:
        last = best.get((loop.name, loop.vectors))
        if last is None or (loop.rows, -len(loop.body) / loop.copies) > (last.rows, -len(last.body) / last.copies):
            best[loop.name, loop.vectors] = loop
    return sorted(best.values())


def simulate(command: list[str], loops: list[Loop]) -> list[tuple[float, dict[str, float]]]:
    """Return for each loop the cycles of an iteration, and the pressure on each port in cycles."""
    regions = ["\n".join(["# LLVM-MCA-BEGIN", *loop.body, "# LLVM-MCA-END\n"]) for loop in loops]
    ran = subprocess.run([*command, "--json", "-"], input="".join(regions), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise MissingError(f"{command[0]} failed: {ran.stderr.strip().splitlines()[0]}")
    result = json.loads(ran.stdout)
    ports = result["TargetInfo"]["Resources"]
    out = []
    for region, loop in zip(result["CodeRegions"], loops, strict=True):
        summary = region["SummaryView"]
        pressure: dict[str, float] = {}
        for use in region["ResourcePressureView"]["ResourcePressureInfo"]:
            if use["InstructionIndex"] == len(loop.body):  # the sum of all instructions
                port = ports[use["ResourceIndex"]].rpartition(".")[0] or ports[use["ResourceIndex"]]
                pressure[port] = max(use["ResourceUsage"] / loop.copies, pressure.get(port, 0.0))
        out.append((summary["TotalCycles"] / summary["Iterations"] / loop.copies, pressure))
    return out


def report(processor: str, results: list[tuple[float, dict[str, float]]], loops: list[Loop]) -> None:
    print(f"{processor}\n{'loop':<22}{'rows':>5}{'vectors':>8}{'instructions':>13}{'cycles':>8}  busiest ports, cycles")
    for loop, (cycles, ports) in zip(loops, results, strict=True):
        busiest = sorted(ports.items(), key=lambda port: -port[1])[:4]
        count = len(loop.body) / loop.copies
        print(f"{loop.name:<22}{loop.rows:>5}{loop.vectors:>8}{count:>13.0f}{cycles:>8.1f}  ", end="")
        print(", ".join(f"{name} {use:.1f}" for name, use in busiest))
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
