"""An interrupt at every line of the calls that load, replace, drop, evict and read adapters again."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
from hash_model import HashExecutor
from interrupts import Lines, Stopped, traced
from scenes import GROUPS, Scene, V, check_idle, outcome, run

from foreword.batch import InputBatch, SamplingParams
from foreword.engine import Engine
from foreword.executors import Capability
from foreword.models.lora import LoraAdapter, file_states

SCENE = Scene("full", "no drafts", 65, {"max_num_seqs": 4, "lora_bytes": 250})
PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
HELD = "law", "code"


class LinesOfAdapters(Lines):
    """Return the lines of the two modules that change adapters."""

    def __call__(self, frame: FrameType, event: str, arg: object) -> object:
        is_here = frame.f_code.co_filename.endswith(("engine/engine.py", "engine/loras.py"))
        return super().__call__(frame, event, arg) if is_here else None


class AdapterExecutor(HashExecutor):
    """Holds adapters of 100 bytes each, which change nothing, and computes requests whose adapter it holds."""

    capabilities = HashExecutor.capabilities | {Capability.LORA}

    def __init__(self) -> None:
        super().__init__(V, GROUPS["full"], SCENE.num_blocks)
        self.held: set[int] = set()

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        assert lora_id not in self.held
        self.held.add(lora_id)
        return 100

    def drop_lora(self, lora_id: int) -> None:
        self.held.discard(lora_id)

    def compute(self, batch: InputBatch, logits_indices):
        assert {*batch.states.lora_id[batch.idx_mapping].tolist()} <= {0, *self.held}
        return super().compute(batch, logits_indices)


def make_engine(folder: Path) -> Engine:
    """Two adapters in memory, one that left it, and a request that uses the first one and has begun."""
    engine = SCENE.engine(executor=AdapterExecutor(), read_lora=read)
    for name in ("verse", *HELD):
        engine.load_lora(name, folder / name)
    engine.add_request("running", PROMPT, PARAMS, lora="law")
    engine.step()
    return engine


def read(path: str) -> LoraAdapter:
    return LoraAdapter(Path(path), {}, file_states(Path(path)))


CHANGES: dict[str, Callable[[Engine, Path], object]] = {
    "load": lambda engine, folder: engine.load_lora("new", folder / "new"),
    "replace": lambda engine, folder: engine.load_lora("law", folder / "new"),
    "drop": lambda engine, folder: engine.drop_lora("code"),
    "drop one in use": lambda engine, folder: engine.drop_lora("law"),
    "read again": lambda engine, folder: engine.add_request("new", PROMPT, PARAMS, lora="verse"),
    "end of one without a name": lambda engine, folder: engine.abort("running"),
}


def check_adapters(engine: Engine) -> None:
    """The executor holds what the engine counts, and no version is there that has neither a name nor a request."""
    loras, executor = engine.loras, engine.executor
    versions = loras._versions
    used = engine._outputs.lora_ids()
    assert executor.held == {lora.lora_id for lora in versions.values() if lora.num_bytes}
    assert used <= executor.held
    assert loras.num_bytes == 100 * len(executor.held)
    assert versions.keys() == used | {lora.lora_id for lora in loras._current.values()}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("change", CHANGES)
def test_adapters_are_as_before_a_change_or_as_after_it(tmp_path, change):
    for name in ("verse", *HELD, "new"):
        (tmp_path / name).write_text("")
    allowed: list[dict[str, Path]] = []
    for line in count():  # the first time, no line is interrupted
        engine = make_engine(tmp_path)
        if change.startswith("end"):
            engine.drop_lora("law")
        if not line:
            allowed.append(engine.loras.paths)
        lines = LinesOfAdapters(Stopped("here"), after=line)
        with suppress(Stopped), traced(lines):
            CHANGES[change](engine, tmp_path)
        if not line:
            allowed.append(engine.loras.paths)
        check_adapters(engine)
        assert engine.loras.paths in allowed
        for output in run(engine).values():
            assert len(output.outputs[0].token_ids) == 3 or output.outputs[0].finish_reason == "abort"
        for name in engine.loras.paths:
            engine.add_request(name, PROMPT, PARAMS, lora=name)
        assert len({str(outcome(output)) for output in run(engine).values()}) == 1
        check_adapters(engine)
        assert engine.loras.num_bytes <= 250
        check_idle(engine)
        if line and lines.hit is None:
            break
    assert line > 10
