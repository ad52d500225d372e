"""The plugin against SGLang's own sources: every function that it hooks, and every attribute that it reads, is there.

`make sglang` downloads the wheel; SGLANG_WHEELS is its folder. The sources are read as syntax trees, not imported.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest

from foreword.shadow import sglang
from foreword.shadow.sglang import INIT_NEW, PROCESS

WHEEL = next(Path(os.environ.get("SGLANG_WHEELS", "/nowhere")).glob("sglang-*.whl"), None)
pytestmark = pytest.mark.skipif(WHEEL is None, reason="needs SGLang's wheel: `make sglang`")

CLASSES = {
    "batch": "ScheduleBatch", "req": "Req", "made": "ForwardBatch", "forward_batch": "ForwardBatch",
    "mode": "ForwardMode", "forward_mode": "ForwardMode", "spec_algorithm": "SpeculativeAlgorithm",
    "model_runner": "ModelRunner", "server": "ServerArgs", "req_to_token_pool": "ReqToTokenPool",
    "result": "GenerationBatchResult",
}  # fmt: skip
"""The name that a value of SGLang has in the plugin → its class."""

FOLLOWED = {"req_to_token_pool", "forward_mode", "spec_algorithm"}
"""Attributes whose own attributes the plugin reads."""


@cache
def sources():
    with ZipFile(WHEEL) as archive:
        names = [name for name in archive.namelist() if name.startswith("sglang/srt/") and name.endswith(".py")]
        return {name: archive.read(name).decode("utf-8") for name in names}


@cache
def class_of(name):
    """The statements of a class of this name. One alone has it."""
    found = [
        node
        for text in sources().values()
        if re.search(rf"^class {name}\b", text, re.MULTILINE)
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found[0] if found else None


@cache
def members(name):
    """The names that objects of a class have: its fields, its methods, what its methods assign, and its bases'."""
    node = class_of(name)
    if node is None:
        return frozenset()
    found = names_of(node)
    if name == "ServerArgs":  # its fields are put together from the classes of a folder
        trees = [ast.parse(text) for path, text in sources().items() if "/arg_groups/fields/" in path]
        found |= {
            one for tree in trees for part in tree.body if isinstance(part, ast.ClassDef) for one in names_of(part)
        }
    found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    for part in ast.walk(node):
        for target in targets(part):
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                    found.add(one.attr)
    return frozenset(found.union(*(members(ast.unparse(base).rpartition(".")[2]) for base in node.bases)))


def names_of(node):
    return {target.id for part in node.body for target in targets(part) if isinstance(target, ast.Name)}


def targets(part):
    if isinstance(part, ast.Assign):
        return part.targets
    return [part.target] if isinstance(part, ast.AnnAssign) else []


def parameters(target):
    """The parameters of a function by its full name, and those that are passed by name alone."""
    module, owner, name = target.rsplit(".", 2)
    tree = ast.parse(sources()[module.replace(".", "/") + ".py"])
    [of_class] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    [function] = [node for node in of_class.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [one.arg for one in function.args.args], [one.arg for one in function.args.kwonlyargs]


def read():
    """(class, attribute) of everything that the plugin reads of values of SGLang."""
    for node in ast.walk(ast.parse(Path(sglang.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            value = node.value
            name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
            if name in CLASSES and (isinstance(value, ast.Name) or name in FOLLOWED):
                yield CLASSES[name], node.attr


READ = sorted(set(read()))


def test_the_hooked_functions_take_what_the_hooks_take():
    assert parameters(INIT_NEW)[0] == ["cls", "batch", "model_runner"]
    assert "return_hidden_states_before_norm" in parameters(INIT_NEW)[1]
    assert parameters(PROCESS) == (["self", "batch", "result"], [])


def test_the_registry_takes_hooks_as_the_plugin_registers_them():
    registry = "sglang.srt.plugins.hook_registry.HookRegistry"
    assert parameters(f"{registry}.register")[0][:4] == ["cls", "target", "hook", "hook_type"]
    assert "AROUND" in members("HookType")
    assert '"sglang.srt.plugins"' in sources()["sglang/srt/plugins/__init__.py"]


def test_the_plugin_reads_values_of_every_class():
    assert {owner for owner, _ in READ} == set(CLASSES.values())
    assert len(READ) > 30


@pytest.mark.parametrize(("owner", "name"), READ, ids=lambda value: value)
def test_an_attribute_that_the_plugin_reads_is_there(owner, name):
    assert name in members(owner)


def test_the_row_of_a_request_is_where_the_plugin_reads_it():
    assert "kv" in members("Req")
    assert "req_pool_idx" in members("ReqKvInfo")
