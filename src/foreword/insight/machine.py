"""Report what the engine finds on this machine, what slows it down, and the fix."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from foreword.executors.nodes import numa_nodes
from foreword.installation import install
from foreword.machine import VARIABLE, cpu_quota, default_threads, memory_limit, memory_sizes, processors, read
from foreword.models import registry
from foreword.native import available, native

Verdict = Literal["ok", "slow", "missing", "absent"]

EXTRAS = {
    "hub": ("huggingface_hub", "models of the hub"),
    "grammar": ("llguidance", "structured outputs"),
    "serve": ("starlette", "foreword serve"),
    "events": ("pyzmq", "cache events"),
    "templates": ("regex", "patterns of chat templates"),
    "images": ("pillow", "images"),
    "torch": ("torch", "executor torch"),
    "transformers": ("transformers", "executor transformers"),
    "vision": ("torchvision", "images with executor transformers"),
    "speech": ("soundfile", "sounds"),
    "ray": ("ray", "Ray Serve and Ray Data"),
    "otel": ("opentelemetry-sdk", "traces of requests"),
}
"""Extra of the package → the distribution that it installs, and the feature that needs it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine.

    verdict: "absent" means not installed, and needed only for some uses. fix: advice for a verdict other than "ok";
    empty if nothing can or need be done.
    """

    subject: str
    value: str
    verdict: Verdict = "ok"
    fix: str = ""


def examine(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield the facts that need no measurement, from the files below ``root``."""
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("processor", processor_name(root))
    yield _instruction_sets()
    yield from _processors(root)
    yield from _memory(root)
    yield _default_model()
    yield from _extras()


def measured(rates: dict[str, Any], model: registry.KnownModel) -> Iterator[Finding]:
    """Yield the machine's rates, which `native.roofline` measures, and the highest speed that they allow with a
    model.
    """
    memory, arithmetic = rates["memory_bytes"], rates["i8_ops"]
    yield Finding("memory rate", f"{memory / 1e9:.1f} GB/s: at most {memory / model.size:.0f} tokens/s per request")
    most = arithmetic / (2 * model.num_parameters)
    yield Finding("8-bit arithmetic", f"{arithmetic / 1e9:.0f} GOP/s: at most {most:.0f} prompt tokens/s")
    yield Finding("fp32, bf16", f"{rates['f32_flops'] / 1e9:.0f}, {rates['bf16_flops'] / 1e9:.0f} GFLOP/s")


def reached(rates: Mapping[str, float], model: registry.KnownModel, decode: float, prefill: float) -> Iterator[Finding]:
    """Yield two shares of the roofline: the share of the measured memory rate that decoding one request uses at
    ``decode`` tokens/s, and the share of the 8-bit arithmetic that a prompt uses at ``prefill`` tokens/s.

    A decoded token reads every weight once; a prompt token takes a multiplication and an addition per weight.
    """
    for name, rate, per_token, limit, unit in (
        ("decode", decode, model.size, rates["memory_bytes"], "GB/s of memory"),
        ("prefill", prefill, 2 * model.num_parameters, rates["i8_ops"], "GOP/s of 8-bit arithmetic"),
    ):
        share = rate * per_token / limit
        bar = "█" * round(20 * min(share, 1.0))
        text = f"{rate:.0f} tokens/s = {rate * per_token / 1e9:.1f} of {limit / 1e9:.1f} {unit}"
        yield Finding(f"roofline, {name}", f"{bar:░<20} {100 * share:.0f}%: {text}")


def processor_name(root: Path = Path("/")) -> str:
    """Return the system's name of the processor, else its architecture."""
    lines = read(root / "proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _instruction_sets() -> Finding:
    if not available():
        return Finding(
            "native module", "not built: the engine runs in NumPy", "missing",
            "Install a C++20 compiler, then install foreword again.",
        )  # fmt: skip
    levels = native.isa_levels()
    chosen = os.environ.get("FOREWORD_ISA") or levels[0]
    value = f"{chosen}, of {', '.join(levels)}"
    if chosen != levels[0]:
        return Finding("instruction set", value, "slow", "Unset FOREWORD_ISA.")
    if chosen == "scalar":
        return Finding("instruction set", value, "slow", "Use a processor with AVX2 or NEON, if there is one.")
    return Finding("instruction set", value)


def _processors(root: Path) -> Iterator[Finding]:
    usable = len(processors())
    total, quota, threads = os.cpu_count() or usable, cpu_quota(root), default_threads(root=root)
    number = f"{threads} thread{'s' if threads > 1 else ''}" + f" by {VARIABLE}" * bool(os.environ.get(VARIABLE))
    if quota is not None and quota < usable:
        value = f"{quota:g} of {total} by the container's limit; {number}"
        if threads > max(1, int(quota)):
            fix = f"Raise the limit, or set {VARIABLE}={max(1, int(quota))}: more threads wait for each other."
            yield Finding("processors", value, "slow", fix)
        else:
            yield Finding("processors", value)
    elif usable < total:
        yield Finding("processors", f"{usable} of {total} by this process's affinity; {number}")
    else:
        yield Finding("processors", f"{usable}; {number}")
    if len(nodes := numa_nodes(root / "sys/devices/system/node")) > 1:
        yield Finding("NUMA nodes", f"{len(nodes)} with processors: see numa_nodes={len(nodes)} (--numa-nodes)")
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 0.5 * usable:
        yield Finding("load", f"{load:.1f} programs wanted a processor in the last minute", "slow",
                      "Stop other programs while the engine runs.")  # fmt: skip
    governor = read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave" and "intel_pstate" not in read(
        root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
    ):
        yield Finding("frequency", "kept low by the governor 'powersave'", "slow",
                      "Run `cpupower frequency-set -g performance` as root.")  # fmt: skip


def _memory(root: Path) -> Iterator[Finding]:
    sizes = memory_sizes(root)
    free, total = sizes.get("MemAvailable"), sizes.get("MemTotal")
    if free is not None and total is not None:
        value = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f}"
        need = 4 * registry.DEFAULT.size  # packed weights, and a cache of some thousand tokens
        if free < need:
            yield Finding("memory", value, "slow", f"Free memory: {registry.DEFAULT.name} wants {need / 1e9:.1f} GB.")
        else:
            yield Finding("memory", value)
    if (limit := memory_limit(root)) is not None and (total is None or limit < total):
        yield Finding("memory limit", f"{limit / 1e9:.1f} GB by the container's limit")
    if pages := read(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        chosen = pages.partition("[")[2].partition("]")[0]
        if chosen == "never":
            yield Finding("huge pages", "off", "slow",
                          "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")  # fmt: skip
        else:
            yield Finding("huge pages", chosen)


def _default_model() -> Finding:
    model = registry.DEFAULT
    if path := registry.cached_path(model.name):
        return Finding("default model", f"{model.name}, {path}")
    return Finding("default model", f"{model.name} is not here", "missing", f"Run `foreword models pull {model.name}`.")


def _extras() -> Iterator[Finding]:
    for extra, (package, use) in EXTRAS.items():
        try:
            yield Finding(f"extra {extra}", f"{package} {version(package)}")
        except PackageNotFoundError:
            fix = f"For {use}: {install(extra)}"
            yield Finding(f"extra {extra}", f"{package} is not installed", "absent", fix)
