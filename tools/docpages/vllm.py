"""The page of vLLM's releases, from what tools/vllm_compat has recorded."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from foreword.batch.adapters.vllm_fields import READ, REFUSED, WITHOUT_EFFECT
from vllm_compat.changes import Change, changes
from vllm_compat.releases import History, Releases
from vllm_compat.watched import WATCHED

ROOT = Path(__file__).parents[2]
DECISIONS = "SchedulerOutput", "NewRequestData", "CachedRequestData"
MARKS = {"fields": "F", "signatures": "S", "bodies": "b", "": "·"}


def page() -> str:
    """Return the page in Markdown."""
    releases = Releases.read()
    steps = {
        after: list(changes(releases.of(before), releases.of(after))) for before, after in pairwise(releases.names)
    }
    lines = [
        "# vLLM's releases",
        "",
        "Plugins and adapters of vLLM read its scheduler's decisions or override methods of its runners. This page",
        "lists what each release changed in these decisions and methods. It is generated: `PYTHONPATH=tools python -m",
        "vllm_compat record RELEASE` reads the Python files of a wheel as syntax trees, and",
        "`make pages` writes this page. `make vllm-compat` compares the newest release with the last one here; if they",
        "differ, it fails and lists the changes.",
        "",
        *textwrap.wrap(f"Recorded: {', '.join(f'{name} ({of})' for name, of in releases.packages.items())}.", 120),
        "",
        "## Summary",
        "",
        "A cell says what a release changed since the one to its left: **F** fields; **S** signatures of methods, or",
        "the class or function itself was added or removed; **b** only bodies of methods; · nothing. Of the runners,",
        "only the methods that are listed under [Methods](#methods) are compared.",
        "",
        *_summary(steps),
        "",
        "## The scheduler's decisions",
        "",
        "`foreword.batch.adapters.vllm.apply` reads these objects by the names of their fields. A field of a later",
        "release's `SchedulerOutput` that is not in the table causes one warning.",
        "",
    ]
    for name in DECISIONS:
        lines += [f"### {name}", "", *_fields(releases, name), ""]
    lines += ["## Methods", "", *_methods(releases, steps), "", "## Release by release", ""]
    for release, found in reversed(steps.items()):
        lines += [f"### {release}", "", *_release(found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(steps: dict[str, list[Change]]) -> Iterator[str]:
    marks = {release: {change.key: MARKS[change.mark] for change in found} for release, found in steps.items()}
    yield f"| class or function | {' | '.join(steps)} | for |"
    yield f"|---|{'---|' * len(steps)}---|"
    for one in WATCHED:
        cells = " | ".join(marks[release].get(one.key, MARKS[""]) for release in steps)
        yield f"| `{one.key}` | {cells} | {one.for_what} |"


def _fields(releases: Releases, name: str) -> Iterator[str]:
    yield "| field | type | since | until | here |"
    yield "|---|---|---|---|---|"
    words = _words_of_adapters()
    for field, history in releases.fields(f"v1.core.sched.output.{name}").items():
        texts = [text for text in history.values() if text is not None]
        since, until = _span(releases, history)
        yield f"| `{field}` | `{_cell(texts[-1])}` | {since} | {until} | {_use(name, field, words)} |"


def _span(releases: Releases, history: History) -> tuple[str, str]:
    """Return the first release with a field, and the last; "" where that is the newest or oldest recorded one."""
    first = next(iter(history))
    end = next((release for release, text in history.items() if text is None), None)
    since = "" if first == releases.names[0] else first
    return since, "" if end is None else releases.names[releases.names.index(end) - 1]


def _use(name: str, field: str, words: set[str]) -> str:
    if name != DECISIONS[0]:
        return "read" if field in words else "not read"
    if field in READ:
        return "read"
    return f"refused: {REFUSED[field]}" if field in REFUSED else f"not needed: {WITHOUT_EFFECT.get(field, 'unknown')}"


def _words_of_adapters() -> set[str]:
    """Return the words of the code that reads vLLM's objects."""
    adapters = (ROOT / "src" / "foreword" / "batch" / "adapters").glob("vllm*.py")
    files = [path for path in adapters if path.name not in ("vllm_fields.py", "vllm_ascend.py")]
    files += (ROOT / "native" / "batch").glob("vllm*")
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def _methods(releases: Releases, steps: dict[str, list[Change]]) -> Iterator[str]:
    yield "| method | arguments in the newest release | signature since | body since |"
    yield "|---|---|---|---|"
    for one in WATCHED:
        if not one.methods and not one.name.startswith("_"):
            continue
        for member, history in releases.members[one.key].items():
            if not member.startswith("method ") or list(history.values())[-1] is None:
                continue
            texts = [(release, *(text or " ").split(" ", 1)) for release, text in history.items()]
            _, body, signature = texts[-1]
            same_signature = [release for release, _, other in reversed(texts) if other == signature]
            same_body = [release for release, other, _ in reversed(texts) if other == body]
            name = one.key if one.name.startswith("_") else f"{one.key}.{member.removeprefix('method ')}"
            yield f"| `{name}` | `{_cell(signature)}` | {same_signature[-1]} | {same_body[-1]} |"


def _release(found: list[Change]) -> Iterator[str]:
    for change in found:
        parts = [*change.fields, *change.signatures]
        if change.bodies:
            parts.append(f"bodies of {', '.join(f'`{name}`' for name in change.bodies)}")
        yield f"- `{change.key}`: {'; '.join(parts)}"
    if not found:
        yield "This release changed nothing that is compared here."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
