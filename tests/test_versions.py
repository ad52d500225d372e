"""A memo keeps the value that was made for a key until an owner changes, and a page lists all memos."""

import ast
import re
from pathlib import Path

import numpy as np

from foreword.batch import InputBuffers, KVGroup, RequestStates
from foreword.cache import KVCacheManager
from foreword.scheduler import Scheduler
from foreword.versions import Memo

ROOT = Path(__file__).parents[1]


class Owner:
    version = 0


def test_a_value_is_found_for_the_same_key_alone():
    memo = Memo[list[int], str]()
    key = [1]
    assert memo.find(key) is None
    assert memo.keep(key, "made") == "made"
    assert memo.find(key) == "made"
    assert memo.find([1]) is None, "an equal key is another one"


def test_a_change_of_any_owner_forgets():
    key, first, second = object(), Owner(), Owner()
    memo = Memo[object, str](first, second)
    for owner in (first, second):
        memo.keep(key, "made")
        assert memo.find(key) == "made"
        owner.version += 1
        assert memo.find(key) is None


def test_a_value_is_found_as_often_as_it_may_be_used():
    memo = Memo[object, str]()
    key = object()
    memo.keep(key, "made", uses=2)
    assert [memo.find(key) for _ in range(3)] == ["made", "made", None]
    memo.keep(key, "made", uses=0)
    assert memo.find(key) is None


def test_the_last_keys_are_remembered_and_the_oldest_is_replaced():
    a, b, c = object(), object(), object()
    memo = Memo[object, str](size=2)
    memo.keep(a, "a")
    memo.keep(b, "b")
    memo.keep(a, "again")
    memo.keep(c, "c")
    assert [memo.find(key) for key in (a, b, c)] == ["again", None, "c"]


def test_a_memo_that_was_told_to_forget_has_nothing():
    memo = Memo[object, str](size=2)
    key = object()
    memo.keep(key, "made")
    memo.forget()
    assert memo.find(key) is None


def declared() -> dict[str, tuple[str, str]]:
    """Every memo of the sources: `Class.attribute` → its type of key and its owners, as the page writes them."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        for owner in classes:
            for node in ast.walk(owner):
                match node:
                    case ast.Assign([target], ast.Call(ast.Subscript(ast.Name("Memo"), ast.Tuple([key, _])), owners)):
                        names = [ast.unparse(name).removeprefix("self.") for name in owners]
                        name = f"{owner.name}.{ast.unparse(target).removeprefix('self.')}"
                        found[name] = ast.unparse(key), ", ".join(f"`{name}`" for name in names)
    return found


def test_the_page_has_every_memo_with_its_key_and_owners():
    memos = (ROOT / "docs" / "remembered.md").read_text().split("## Memos")[1].split("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in memos.splitlines() if line.startswith("| `")]
    on_page = {name.strip("`"): (key.strip("`"), owners) for name, key, owners in rows}
    assert on_page == declared()
    uses = sum(len(re.findall(r"(?<!class )\bMemo[\[(]", path.read_text())) for path in (ROOT / "src").rglob("*.py"))
    assert uses == len(on_page), "a memo is an attribute of a class, made as Memo[Key, Value](owners)"


def test_every_version_on_the_page_exists():
    page = (ROOT / "docs" / "remembered.md").read_text().split("## Versions")[1].split("## Flags")[0]
    names = re.findall(r"^\| `(\w+)\.(\w+)`", page, re.MULTILINE)
    assert len(names) == len(set(names)) > 0
    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=8, kv_groups=[KVGroup(block_size=4)])
    cache = KVCacheManager(states, 8)
    scheduler = Scheduler(states, cache)
    buffers = InputBuffers.for_states(states, 8)
    found = [states, states.sampling, states.block_tables[0], cache, buffers, scheduler.waiting, scheduler.drafts]
    owners = {type(owner).__name__: owner for owner in found}
    for owner, version in names:
        assert np.issubdtype(np.asarray(getattr(owners[owner], version)).dtype, np.integer), f"{owner}.{version}"
