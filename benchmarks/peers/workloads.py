"""W1–W9: the requests of `foreword bench`, loaded from the source file, because most environments lack Foreword."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[2] / "src" / "foreword" / "bench" / "requests.py"
_spec = importlib.util.spec_from_file_location("foreword_bench_requests", _SOURCE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module  # required by dataclasses
_spec.loader.exec_module(_module)

NAMES: tuple[str, ...] = _module.NAMES
PROMPTS: dict[str, int] = _module.PROMPTS
Requests = _module.Requests
make = _module.make
