"""Check the prose of pages, docstrings, comments, help texts and messages: `make check`.

    python tools/prose.py            # every sentence that breaks a rule, with what to write instead; exit status 1

A rule is a pattern of a phrase that readers had to read twice, and the plain English for it. Another rule refuses
docstrings of functions that begin with a fragment, such as "Whether" or "Those". Code inside of Markdown is not read.
Lines of pages have at most 120 columns, apart from tables, links and the pages that `make pages` writes whole.
Logs of measurements keep their words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LOGS = ("benchmarks/log/", "docs/benchmarks-log.md", "tools/prose.py")


class Rule(NamedTuple):
    """A phrase and what to write instead."""

    pattern: str
    instead: str


RULES = (
    Rule(r"(?<!there )\bis no (?!longer\b|more\b|less\b|other\b|such\b|fewer\b)[a-z]+", "'is not a …', 'must be …'"),
    Rule(r"\bin sum\b(?!mary)", "'in total', or 'whose total is …'"),
    Rule(r"\bon the mean\b(?! of)", "'on average'"),
    Rule(r"\bdearest\b", "'most expensive'"),
    Rule(r"\b(?:one|a) \w+ a request\b", "'per request'"),
    Rule(r"\bsigns? of life\b", "'keep-alive'"),
    Rule(r"\bholds? [^.|]{1,40} against\b|\bheld against\b", "'compares … with …'"),
    Rule(r"\b(?:is|are|was|were|not) told\b", "'is reported', 'is published', 'is given'"),
    Rule(r"\btells of\b", "'reports'"),
    Rule(r"\bwrites? down speech|\bwritten down\b", "'transcribe'"),
    Rule(r"\bbelongs? into\b", "'belongs in', or 'put … in …'"),
    Rule(r"\bmend(?:s|ed|ing)?\b", "'fix'"),
    Rule(r"\bof which all\b", "two sentences"),
    Rule(r"\bequally many\b", "'the same number of'"),
    Rule(r"\bmade of the name\b", "'made from the name'"),
    Rule(r"\bwhen to come again\b", "'when to try again'"),
    Rule(r"\bgo(?:es)? before (?:a|the) variables?\b", "'takes precedence over'"),
    Rule(r"\bhow prompts go on\b", "'complete a prompt'"),
    Rule(r"\bbrought to the truth\b", "'updated'"),
    Rule(r"\bwho stops listening\b", "'a consumer that stops iterating'"),
    Rule(r"\bhas least of\b", "'minimises'"),
    Rule(r"\bonly the likeliest\b", "'sample from the smallest set of …'"),
    Rule(r"\bthe chance that\b", "'the probability that'"),
    Rule(r"\bas ever\b", "'as usual'"),
    Rule(r"\bmade anew\b", "'made again'"),
    Rule(r"\bseed of its own\b", "'its own seed'"),
    Rule(r"\bthe truth\b", "'authoritative', or say which data is used"),
    Rule(r"\bhow often\b", "'the number of times that …'"),
    Rule(r"\b(?:that|if it) is (?-i:none)\b", "'that is not a …'"),
    Rule(r"\bnobody\b", "'no request', 'no code', 'not …'"),
    Rule(r"\bNone without(?: any)?[.;)]", "'None if there is none'"),
    Rule(r"\bwhat there is\b", "name the things"),
    Rule(r"\brandom lives\b", "'random traffic'"),
    Rule(r"\bprov(?:es?|en) (?:each|the) other\b", "'can be compared with each other'"),
    Rule(r"\bmakes? (?:it|them) forget\b", "'when it becomes invalid'"),
    Rule(r"\b(?:goes|go) on to (?!the )[a-z]+", "'still …', or 'continues to …'"),
    Rule(r"(?:^|\. +)[A-Z]\w+Error(?: \d+)? (?:if|for|unless|when|where|as)\b", "'Raise …Error if …'"),
    Rule(r"\bwhatever (?:it|they|he) (?:has|have|is|are|was|were)\b", "name the cases"),
)  # fmt: skip
FRAGMENT = Rule(
    r"(?:What|Whether|How|Those|Of|Also|Its|Their|The same)\b", "a sentence that begins with a verb, such as 'Return …'"
)
WRITTEN = "`make pages` writes this page"
WIDTH = 120
PATTERN = re.compile("|".join(f"(?P<r{at}>{rule.pattern})" for at, rule in enumerate(RULES)), re.I)


class Fault(NamedTuple):
    """A phrase in a file, and what to write instead."""

    place: str
    phrase: str
    instead: str


def of_text(text: str, place: str, first_line: int = 1) -> Iterator[Fault]:
    """Yield the faults of a text whose first line has this number in its file."""
    for match in PATTERN.finditer(text.replace("\n", " ")):
        rule = RULES[int((match.lastgroup or "r0")[1:])]
        line = first_line + text.count("\n", 0, match.start())
        yield Fault(f"{place}:{line}", match[0], rule.instead)


def of_markdown(text: str, place: str) -> Iterator[Fault]:
    """Yield the faults of a page, apart from its code and its links."""
    code = re.compile(r"^```.*?^```$|`[^`\n]+`|<!--.*?-->|\]\([^)]*\)", re.S | re.M)
    words = code.sub(lambda m: re.sub(r"[^\n]", "·", m[0]), text)
    yield from of_text(words, place)
    blocks = re.compile(r"^```.*?^```$|<!-- (\S[^>]*?) -->.*?<!-- /\1 -->", re.S | re.M)  # code, and what is written
    rest = "" if WRITTEN in text else blocks.sub(lambda m: "\n" * m[0].count("\n"), text)
    for at, line in enumerate(rest.split("\n"), 1):
        if len(line) > WIDTH and not line.startswith("|") and "](" not in line and "://" not in line:
            yield Fault(f"{place}:{at}", f"{line[:40]}…", f"lines of at most {WIDTH} columns")


def of_python(text: str, place: str) -> Iterator[Fault]:
    """Yield the faults of the texts of a module: docstrings, comments, help texts, messages."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from of_text(node.value, place, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            start := re.match(FRAGMENT.pattern, ast.get_docstring(node) or "")
        ):
            yield Fault(f"{place}:{node.body[0].lineno}", start[0], FRAGMENT.instead)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from of_text(token.string, place, token.start[0])


def files() -> Iterator[Path]:
    """Yield the files whose prose is checked."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "examples", "benchmarks", "src"):
        yield from sorted((ROOT / folder).rglob("*.md"))
    for folder in ("src", "examples", "benchmarks", "tools"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def main() -> int:
    """Print every fault. Return the exit status."""
    found = 0
    for path in files():
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(LOGS):
            continue
        read = of_markdown if path.suffix == ".md" else of_python
        for fault in read(path.read_text(encoding="utf-8"), place):
            print(f"{fault.place}: {fault.phrase!r}: write {fault.instead}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
