"""Time from the start of a process to its first token, and its peak memory, measured by the parent process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from foreword.errors import EngineError

_CHILD = """
import json, sys, time
started = time.time()
from foreword import LLM, SamplingParams
imported = time.time()
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
loaded = time.time()
llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1), progress=False)
print(json.dumps([started, imported, loaded, time.time()]))
"""


@dataclass(frozen=True, slots=True)
class StartupResult:
    """Seconds from the start of the process until Python runs, the import is done, the model is loaded, and the first
    token is generated. peak_mb: peak resident memory in 10⁶ bytes.
    """

    python_s: float
    import_s: float
    load_s: float
    first_token_s: float
    peak_mb: float


def run(model: str, options: Mapping[str, object]) -> StartupResult:
    """Start a process that loads ``model`` and generates a token. The first call warms the file cache, and compiles the
    modules, which an installed package has compiled.

    Raise EngineError, with the last line of the process, if it fails.
    """
    begin = time.time()
    command = [sys.executable, "-c", _CHILD, model, json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if child.returncode:
        reason = child.stderr.strip().rpartition("\n")[2]
        raise EngineError(f"the measured process ended with status {child.returncode}: {reason}")
    started, imported, loaded, first = (t - begin for t in json.loads(child.stdout.splitlines()[-1]))
    peak_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return StartupResult(started, imported, loaded, first, peak_kb * 1024 / 1e6)
