"""Check the prose of pages, docstrings, comments, help texts and messages, in Python and C++: `make check`.

    python tools/prose.py            # every sentence that breaks a rule, with what to write instead; exit status 1

A rule is a pattern of a phrase that readers had to read twice, and the plain English for it. Other rules concern the
beginning of a text. A docstring of a function begins with a verb of `VERBS`, or is a sentence with one of `FINITE`; a
property may begin with "The". No docstring or comment begins with a fragment, such as "Of", "Whether" or "The same
with". Code inside of Markdown is not read. Lines of pages and of C++ have at most 120 columns, apart from tables, links
and the pages that `make pages` writes whole. Logs of measurements keep their words.
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
LOGS = ("benchmarks/log/", "docs/benchmarks-log.md", "tools/prose.py", "tests/docs/test_prose.py")


class Rule(NamedTuple):
    """A phrase and what to write instead."""

    pattern: str
    instead: str


RULES = (
    Rule(r"(?<!there )\bis no (?:$|(?!(?:longer|more|less|other|such|fewer)\b)[a-z]+)", "'is not a …', 'must be …'"),
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
    Rule(r"(?:^|\. +)[A-Z]\w+Error(?: (?:with|without|past|naming)|, with)\b", "'Raise …Error …'"),
    Rule(r"(?<=\. )(?:True|False|None) (?:for|without|with)\b", "'Return True for …', or a sentence with a verb"),
    Rule(r"(?:^|(?<=\. ))(?:Idempotent|Harmless a second time|All or nothing)[.;]", "'A second call changes nothing.'"),
    Rule(r"(?<=\. )O\([^)]*\)(?: per \w+)?\.", "'It costs O(…).'"),
)  # fmt: skip
FRAGMENT = re.compile(
    r"(?:What|Whether|How|Those|Of|Whose|Also|Its|Their|As (?:in|for|of)|In place of|"
    r"The same(?: (?:with|without|for|of|as|in|where|if|when|to|on|by))?[ :.,])\b|From .{1,60}? to (?:a|an|the) "
)
_VERBS = """
Abort Accept Add Admit Advance Allocate Alternate Answer Append Apply Ask Attend Be Begin Bring Build Cache Call Cancel
Change Charge Check Choose Clear Close Collect Combine Commit Compare Compile Complete Compute Connect Consume Continue
Control Convert Copy Correct Count Cut Declare Decode Delete Describe Detect Determine Divide Do Download Draft Draw
Drop Empty End Exchange Extend Fetch Fill Find Finish Follow Forbid Forget Forward Free Generate Give Handle Hash Hide
Hold Import Index Install Invert Iterate Join Keep Kill Launch Learn Let Limit List Load Log Make Manage Map Mark
Measure Merge Move Name Note Offer Open Order Pack Pair Parse Partition Pass Plan Pool Predict Prepare Print Probe
Project Propose Provide Publish Push Put Queue Raise Read Receive Recommend Record Reduce Refuse Register Release Remove
Repeat Replace Replay Report Reserve Resolve Restore Return Rotate Round Run Sample Save Say Search See Send Serve Set
Show Shrink Sort Split Spread Start Stop Store Subtract Swap Take Talk Time Trace Transcribe Translate Turn Undo Unload
Unpack Update Use Wait Warn Within Wrap Write Yield Zero
"""
VERBS = frozenset(_VERBS.split())
FINITE = re.compile(r"\b(?:is|are|was|were|has|have|had|can|cannot|may|must|does|do|entered|ended|changed|returned)\b")
NO_VERB = "a sentence that begins with a verb, such as 'Return …'; a new verb is added to VERBS"
COMMENT = re.compile(
    r"Whether\b|[Oo]f\b|[Ww]hose\b|As (?:in|for)\b|[Tt]he same (?:with|without|for|of|as|in|where|if|when|to|on)\b"
)
NOUN = "a noun or a sentence: 'bytes of a value' instead of 'of a value'"
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


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a property."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def docstrings(tree: ast.AST, *, are_facts: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and what to write instead of each docstring that begins without a verb, or with a fragment.

    are_facts: the names of the functions are the sentences, as in tests, and their docstrings add to them.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        line, first = node.body[0].lineno, re.split(r"(?<=[.:;])\s", text)[0]
        if are_facts or isinstance(node, ast.Module | ast.ClassDef):
            if FRAGMENT.match(text):
                yield line, text, "a noun or a verb"
            continue
        begins = re.match(r"\w+", text)
        if begins and (begins[0] in VERBS or (is_property(node) and begins[0] in {"The", "A", "An", "All", "Every"})):
            continue
        if FRAGMENT.match(text) or not (text[0].isupper() and FINITE.search(first)):
            yield line, text, NO_VERB


def comments(lines: list[tuple[int, bool, str]], place: str) -> Iterator[Fault]:
    """Yield the faults of comments: line, whether it has the line for itself, and text of each.

    Lines that follow each other are one comment.
    """
    joined: list[tuple[int, int, str]] = []  # first and last line, and text
    for line, alone, words in lines:
        if alone and joined and joined[-1][1] == line - 1:
            joined[-1] = joined[-1][0], line, f"{joined[-1][2]}\n{words}"
        else:
            joined.append((line, line if alone else -1, words))
    for line, _, words in joined:
        yield from of_text(words, place, line)
        if COMMENT.match(words):
            yield Fault(f"{place}:{line}", words[:40], NOUN)


def of_python(text: str, place: str) -> Iterator[Fault]:
    """Yield the faults of the texts of a module: docstrings, comments, help texts, messages."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from of_text(node.value, place, node.lineno)
    for line, words, instead in docstrings(tree, are_facts=place.startswith("tests/")):
        yield Fault(f"{place}:{line}", words[:40], instead)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token for token in tokens if token.type == tokenize.COMMENT]
    lines = [(t.start[0], not t.line[: t.start[1]].strip(), t.string.lstrip("#: ")) for t in found]
    yield from comments(lines, place)


def of_cpp(text: str, place: str) -> Iterator[Fault]:
    """Yield the faults of the comments of a C++ file, and its lines that are too long."""
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > WIDTH:
            yield Fault(f"{place}:{number}", f"{line.strip()[:40]}…", f"lines of at most {WIDTH} columns")
        code = re.sub(r'"(?:\\.|[^"\\])*"', lambda match: "·" * len(match[0]), line)
        if (at := code.find("//")) >= 0:
            lines.append((number, not line[:at].strip(), line[at:].lstrip("/ ")))
    yield from comments(lines, place)


READERS = {".md": of_markdown, ".py": of_python, ".h": of_cpp, ".cpp": of_cpp}


def files() -> Iterator[Path]:
    """Yield the files whose prose is checked."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "examples", "benchmarks", "src"):
        yield from sorted((ROOT / folder).rglob("*.md"))
    for folder in ("src", "examples", "benchmarks", "tools", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))
    for kind in ("*.h", "*.cpp"):
        yield from sorted((ROOT / "native").rglob(kind))


def main() -> int:
    """Print every fault. Return the exit status."""
    found = 0
    for path in files():
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(LOGS):
            continue
        read = READERS[path.suffix]
        for fault in read(path.read_text(encoding="utf-8"), place):
            print(f"{fault.place}: {fault.phrase!r}: write {fault.instead}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
