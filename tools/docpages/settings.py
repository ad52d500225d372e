"""The page of settings, and the types of options for editors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from foreword.engine.config import GROUPS
from foreword.engine.options import ADAPTER, EXECUTOR, MODEL, PLUG_INS, executor_settings, option_settings
from foreword.executors.kinds import KINDS
from foreword.server.config import ServerConfig
from foreword.settings import Setting, settings_of

BY_HAND = {"policy", "speculation"}
"""Options that take objects, too: their types are in `LLMOptions`."""


def option_types() -> str:
    """Return the source of `foreword.engine.option_types`."""
    names = [*(name for group in GROUPS.values() for name in group), *executor_settings()]
    flat = {name: known for group in option_settings().values() for name, known in group.items()}
    lines = [f"    {name}: {_python_type(flat[name], given=True)}" for name in names if name not in BY_HAND]
    head = _TYPES_HEAD.replace("from typing", "from os import PathLike\nfrom typing")
    return "\n".join([head + _ENGINE_HEAD, *lines, ""])


def executor_option_types() -> str:
    """Return the source of `foreword.executors.option_types`."""
    lines = [_TYPES_HEAD.rstrip("\n")]
    for kind in KINDS.values():
        if known := settings_of(kind.options):
            lines += ["", "", f"class {kind.options.__name__.removesuffix('Options')}Keywords(TypedDict, total=False):"]
            lines += [f'    """The options of `{kind.options.__name__}`, as keywords."""', ""]
            lines += [f"    {name}: {_python_type(one)}" for name, one in known.items()]
    return "\n".join([*lines, ""])


_TYPES_HEAD = '''"""Types of options for editors and type checkers. `make pages` writes them from the settings."""

from __future__ import annotations

from typing import Literal, TypedDict
'''
_ENGINE_HEAD = '''

class EngineOptions(TypedDict, total=False):
    """Settings of engine, scheduler, speculation and executors. docs/settings.md has their meaning."""
'''


_MORE_TYPES = {"bytes": " | str", "path": " | PathLike[str]"}


def _python_type(known: Setting, *, given: bool = False) -> str:
    """Return a type of Python. given: of what users give, which is converted."""
    text = f"Literal[{', '.join(map(_quoted, known.choices))}]" if known.choices else known.type
    text += _MORE_TYPES.get(known.unit, "") if given else ""
    return f"{text} | None" if known.optional else text


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
| commands with a model | `--max-num-seqs 32`; a flag has two forms, `--prefix-caching` and `--no-prefix-caching` |
| environment | `FOREWORD_SERVE_MAX_NUM_SEQS=32`; for another command, its name replaces `SERVE` |
| file | `max_num_seqs = 32` in the TOML file that `--config FILE` names |

The command line takes precedence over variables, and variables over the file. In Python, None means the
default, unless the table gives None another meaning. Sizes in bytes may be texts: `512`, `1.5GB` (10⁹), `2GiB` (2³⁰).
For an unknown name, or a value of another type or out of range, an error says what is expected.
"""


_PARTS = (
    "In Python, `executor`, `drafter` and the lists `observers` and `logits_processors` take objects and functions, "
    "too, and\n`loras` is a dictionary of paths by name."
)


def _page_lines() -> Iterator[str]:
    yield from _table("Model and parts", (MODEL, ADAPTER, EXECUTOR, *PLUG_INS), _PARTS)
    for heading, known in GROUPS.items():
        yield from _table(heading, known.values())
    for kind in KINDS.values():
        own = settings_of(kind.options).values()
        packages = " and ".join(kind.packages)
        needs = f" It needs {packages}, of `foreword[{kind.extra}]` ([how](installation.md))." if packages else ""
        summary = f'{(kind.__doc__ or "").strip()} `executor="{kind.name}"`.{needs}'
        yield from _table(f"Executor {kind.name}", own, summary)
    yield from _table("Server", settings_of(ServerConfig).values(), "Only `foreword serve` has these settings.")


def _table(heading: str, known: Iterable[Setting], summary: str = "") -> Iterator[str]:
    yield f"## {heading}\n"
    if summary:
        yield f"{summary}\n"
    rows = [f"| `{one.name}` | {_page_type(one)} | {_default(one)} | {_text(one.help)} |" for one in known]
    if rows:
        yield from ("| name | value | default | meaning |", "|---|---|---|---|", *rows, "")


def _page_type(one: Setting) -> str:
    if one.choices:
        return ", ".join(f"`{choice}`" for choice in one.choices)
    name = {"int": "integer", "float": "number", "bool": "flag", "str": "text"}.get(one.type, "text, repeatable")
    limits = ", ".join(filter(None, (name, one.limits.removeprefix("from "))))
    return limits + ", or a size" * (one.unit == "bytes")


def _default(one: Setting) -> str:
    if one.default is None:
        return "–"
    return "–" if one.default == () else f"`{one.text_of(one.default)}`"


def _text(help: str) -> str:
    return help.replace("|", "\\|")
