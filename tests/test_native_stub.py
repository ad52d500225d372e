"""The types of the native module are those that its bindings record."""

import ast
import runpy
from pathlib import Path

import pytest

pytest.importorskip("nanobind", minversion="3.1")
pytest.importorskip("foreword._native", exc_type=ImportError)

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "stubs.py"))


def test_the_stub_of_the_native_module_is_up_to_date():
    written = TOOL["canonical"](ast.parse(TOOL["STUB"].read_text(encoding="utf-8")))
    assert ast.unparse(written) == ast.unparse(TOOL["generate"]()), "run `make stubs`"
