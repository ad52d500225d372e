"""The recorded releases: a file with each field and method once, from the release on in which it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_compat.facts import Fact, Facts

PATH = Path(__file__).with_name("releases.json")
History = dict[str, str | None]
"""Release → a text that holds from it on; None: there is no such thing."""


def number(release: str) -> tuple[int, ...]:
    """Return a release as numbers, for the order: "0.27.1" → (0, 27, 1)."""
    return tuple(map(int, release.split(".")))


@dataclass(frozen=True, slots=True)
class Releases:
    """packages: release → the package whose wheel was read. members: key → member → its history.

    A member is "field NAME", whose text is as in `Fact`, "method NAME", whose text is its body's hash and its
    signature, or "" for the class or function itself.
    """

    packages: dict[str, str]
    members: dict[str, dict[str, History]]

    @staticmethod
    def read() -> Releases:
        value = json.loads(PATH.read_text(encoding="utf-8"))
        return Releases(value["packages"], value["members"])

    @staticmethod
    def of_facts(packages: Mapping[str, str], facts: Mapping[str, Facts]) -> Releases:
        """Return the releases of their facts."""
        names, members = sorted(packages, key=number), dict[str, dict[str, History]]()
        for release in names:
            for key, fact in facts[release].items():
                known, flat = members.setdefault(key, {}), dict(_flat(fact))
                for member in (*known, *(name for name in flat if name not in known)):
                    history, text = known.setdefault(member, {}), flat.get(member)
                    if (list(history.values())[-1] if history else None) != text:
                        history[release] = text
        return Releases({name: packages[name] for name in names}, members)

    def write(self) -> None:
        value = {"packages": self.packages, "members": self.members}
        lines = json.dumps(value, indent=1).split("\n")
        PATH.write_text("\n".join(_joined(lines)) + "\n", encoding="utf-8")

    @property
    def names(self) -> list[str]:
        """The releases, ascending."""
        return list(self.packages)

    def of(self, release: str) -> Facts:
        """Return the facts of a release."""
        return {key: _fact(members, release) for key, members in self.members.items()}

    def fields(self, key: str) -> dict[str, History]:
        """Return the histories of the fields of a class, those of the newest release first."""
        found = {name.removeprefix("field "): of for name, of in self.members[key].items() if name.startswith("field ")}
        return dict(sorted(found.items(), key=lambda item: list(item[1].values())[-1] is None))


def _flat(fact: Fact | None) -> Iterator[tuple[str, str]]:
    if fact is None:
        return
    yield "", ""
    for name, text in fact["fields"].items():
        yield f"field {name}", text
    for name, method in fact["methods"].items():
        yield f"method {name}", f"{method['body']} {method['signature']}"


def _fact(members: Mapping[str, History], release: str) -> Fact | None:
    texts = {}
    for member, history in members.items():
        since = [name for name in history if number(name) <= number(release)]
        if since and (text := history[since[-1]]) is not None:
            texts[member] = text
    if "" not in texts:
        return None
    fact: Fact = {"fields": {}, "methods": {}}
    for member, text in texts.items():
        kind, _, name = member.partition(" ")
        if kind == "field":
            fact["fields"][name] = text
        elif kind == "method":
            body, _, signature = text.partition(" ")
            fact["methods"][name] = {"signature": signature, "body": body}
    return fact


def _joined(lines: list[str]) -> Iterator[str]:
    """Return the lines of JSON with a history on one line."""
    history: list[str] = []
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if depth >= 4 or (history and depth == 3):
            history.append(line.strip())
            if depth == 3:
                yield "".join((f"   {history[0]}", " ".join(history[1:-1]), history[-1]))
                history = []
        elif depth == 3 and line.endswith("{"):
            history = [line.strip()]
        else:
            yield line
