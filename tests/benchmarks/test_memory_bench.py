"""The memory benchmark measures a process of its own, and its parts are the whole peak."""

import sys
from pathlib import Path

import pytest
from parts import memory

from foreword.errors import EngineError
from foreword.native import available

pytestmark = [
    pytest.mark.skipif(not available(), reason="the native module is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell the memory of a process by its use"),
]


@pytest.mark.long
def test_the_parts_of_the_peak_add_up(talker: Path):
    [found] = memory.run(str(talker), formats=["auto/int8"], workloads=["W1"], options={})
    assert (found.formats, found.workload) == ("auto/int8", "W1")
    parts = (found.program, found.weights, found.kv, found.model, found.steps)
    assert sum(parts) == pytest.approx(found.peak)
    assert min(found.program, found.kv, found.model) > 0
    assert found.over == pytest.approx(found.peak / (found.weights + found.kv) - 1)


@pytest.mark.long
def test_a_process_that_fails_ends_with_its_error(tmp_path):
    with pytest.raises(EngineError, match="the measured process failed"):
        list(memory.run(str(tmp_path / "none.gguf"), formats=["auto/bf16"], workloads=["W1"], options={}))
