"""The page of settings, and the types of options for editors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from foreword.engine.config import GROUPS
from foreword.engine.options import executor_settings
from foreword.executors.kinds import KINDS
from foreword.server.config import ServerConfig
from foreword.settings import Setting, settings_of

BY_HAND = {"policy", "speculation"}
"""Options that take objects, too: their types are in `LLMOptions`."""


def option_types() -> str:
    """Return the source of `foreword.engine.option_types`."""
    flat = {name: [known] for group in GROUPS.values() for name, known in group.items()}
    flat |= {name: list(kinds.values()) for name, kinds in executor_settings().items()}
    lines = [f"    {name}: {_python_type(known, sizes=True)}" for name, known in flat.items() if name not in BY_HAND]
    return "\n".join([_TYPES_HEAD + _ENGINE_HEAD, *lines, ""])


def executor_option_types() -> str:
    """Return the source of `foreword.executors.option_types`."""
    lines = [_TYPES_HEAD.rstrip("\n")]
    for kind in KINDS.values():
        if known := settings_of(kind.options):
            lines += ["", "", f"class {kind.options.__name__.removesuffix('Options')}Keywords(TypedDict, total=False):"]
            lines += [f'    """See `{kind.options.__name__}`."""', ""]
            lines += [f"    {name}: {_python_type([one])}" for name, one in known.items()]
    return "\n".join([*lines, ""])


_TYPES_HEAD = '''"""Types of options for editors and type checkers. Written by `make pages` from the settings."""

from __future__ import annotations

from typing import Literal, TypedDict
'''
_ENGINE_HEAD = '''

class EngineOptions(TypedDict, total=False):
    """Settings of engine, scheduler, speculation and executors. docs/settings.md has their meaning."""
'''


def _python_type(known: Iterable[Setting], *, sizes: bool = False) -> str:
    """Return a type of Python. sizes: whether sizes in bytes may be texts."""
    kinds = list(known)
    choices = dict.fromkeys(choice for one in kinds for choice in one.choices)
    if choices and all(one.choices for one in kinds):
        text = f"Literal[{', '.join(map(_quoted, choices))}]"
    else:
        text = kinds[0].kind.__name__
    text += " | str" * (sizes and kinds[0].unit == "bytes")
    return f"{text} | None" if any(one.optional for one in kinds) else text


def _quoted(text: str) -> str:
    return f'"{text}"'


def page() -> str:
    """Return docs/settings.md."""
    return "\n".join([_PAGE_HEAD, *_page_lines(), ""])


_PAGE_HEAD = """# Settings

<!-- Written by `make pages` from the classes of settings. -->

Each setting has one name everywhere:

| where | how |
|---|---|
| Python | `LLM("smollm2", max_num_seqs=32)`, and the same for `AsyncLLM` |
| `run`, `chat`, `batch`, `serve` | `--max-num-seqs 32`; of a flag `--prefix-caching` and `--no-prefix-caching` |
| environment | `FOREWORD_SERVE_MAX_NUM_SEQS=32`, with the name of the command in place of `SERVE` |
| file | `max_num_seqs = 32` in a TOML file, which `--config FILE` names |

An option of the command line goes before a variable, a variable before the file. In Python, None stands for the default
where it is no value of its own. Sizes in bytes may be texts: `512`, `1.5GB` (10⁹), `2GiB` (2³⁰). A value of another
type or out of range, and an unknown name, are refused with what is expected.
"""


def _page_lines() -> Iterator[str]:
    for heading, known in GROUPS.items():
        yield from _table(heading, known.values())
    for kind in KINDS.values():
        own = settings_of(kind.options).values()
        needs = f" It needs {' and '.join(kind.packages)}: {kind.install}." if kind.packages else ""
        summary = f'{(kind.__doc__ or "").strip()} `executor="{kind.name}"`.{needs}'
        yield from _table(f"Executor {kind.name}", own, summary)
    yield from _table("Server", settings_of(ServerConfig).values(), "Of `foreword serve` alone.")


def _table(heading: str, known: Iterable[Setting], summary: str = "") -> Iterator[str]:
    yield f"## {heading}\n"
    if summary:
        yield f"{summary}\n"
    rows = [f"| `{one.name}` | {_page_type(one)} | {_default(one)} | {_text(one.help)} |" for one in known]
    if rows:
        yield from ("| name | value | default | meaning |", "|---|---|---|---|", *rows, "")


def _page_type(one: Setting) -> str:
    if one.choices:
        text = ", ".join(f"`{choice}`" for choice in one.choices)
    elif one.is_number:
        text = f"{'integer' if one.kind is int else 'number'}, {_limit(one.least)} to {_limit(one.most)}"
        text += ", or a size" * (one.unit == "bytes")
    else:
        text = {bool: "flag", str: "text"}[one.kind]
    return f"{text}, repeatable" if one.repeated else text


def _limit(number: float) -> str:
    if number == -(2**63):
        return "−2^63"
    power = int(number).bit_length() - 1
    if number >= 2**20 and int(number) in (2**power, 2 ** (power + 1) - 1):
        return f"2^{power}" if int(number) == 2**power else f"2^{power + 1} − 1"
    return f"{number:g}"


def _default(one: Setting) -> str:
    if one.default is None:
        return "–"
    if one.unit == "bytes" and isinstance(one.default, int) and one.default >= 1 << 20:
        return f"{one.default >> 20} MiB" if one.default % (1 << 30) else f"{one.default >> 30} GiB"
    return "–" if one.default == () else f"`{one.default}`"


def _text(help: str) -> str:
    return help.replace("|", "\\|")
