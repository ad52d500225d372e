"""Find the changes between two releases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_compat.facts import Fact, Facts


@dataclass(slots=True)
class Change:
    """Changes of a class or function. fields, signatures: lines of text. bodies: methods with the same signature."""

    key: str
    fields: list[str] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)

    @property
    def mark(self) -> str:
        """The most that changed: "fields", "signatures", "bodies", or nothing."""
        return next((name for name in ("fields", "signatures", "bodies") if getattr(self, name)), "")


def changes(before: Facts, after: Facts) -> Iterator[Change]:
    """Yield what differs, for each that does."""
    for key, new in after.items():
        change = _change(key, before.get(key), new)
        if change.mark:
            yield change


def _change(key: str, old: Fact | None, new: Fact | None) -> Change:
    change = Change(key)
    if old is None or new is None:
        if old is not new:
            change.signatures.append("is gone" if new is None else "is new")
        return change
    a, b = old["fields"], new["fields"]
    change.fields += [f"+ `{name}`{_of(b[name])}" for name in b if name not in a]
    change.fields += [f"− `{name}`" for name in a if name not in b]
    change.fields += [
        f"`{name}`: `{a[name] or 'untyped'}` → `{b[name] or 'untyped'}`"
        for name in b
        if a.get(name, b[name]) != b[name]
    ]
    before, after = old["methods"], new["methods"]
    change.signatures += [f"+ `{name}{after[name]['signature']}`" for name in after if name not in before]
    change.signatures += [f"− `{name}`" for name in before if name not in after]
    for name in (name for name in after if name in before):
        if before[name]["signature"] != after[name]["signature"]:
            change.signatures.append(f"`{name}`: {_arguments(before[name]['signature'], after[name]['signature'])}")
        elif before[name]["body"] != after[name]["body"]:
            change.bodies.append(name)
    return change


def _of(text: str) -> str:
    return f": `{text}`" if text else ""


def _arguments(old: str, new: str) -> str:
    """Return the arguments by which two signatures differ."""
    a, b = _parts(old), _parts(new)
    found = [f"+ `{one}`" for one in b if one not in a] + [f"− `{one}`" for one in a if one not in b]
    return ", ".join(found) or "the order of its arguments"


def _parts(signature: str) -> list[str]:
    """Return the arguments of a signature and what it returns, split at the commas outside of brackets."""
    parts, depth, begin = [], 0, 1
    for i, letter in enumerate(signature):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(signature[begin:i].strip())
            begin = i + 1
            if depth == 0:
                break
    return [part for part in (*parts, signature[begin:].strip()) if part]
