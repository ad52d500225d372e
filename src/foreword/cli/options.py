"""Make the options that several commands share from the tables of settings, and print results as lines or JSON."""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, cast

import typer

from foreword.cli.app import option_names
from foreword.cli.terminal import note
from foreword.declared import Declared
from foreword.engine.loras import named_paths
from foreword.engine.options import LLMOptions, executor_settings, option_settings
from foreword.errors import ConfigError, setting_text
from foreword.jsonfile import read_bytes
from foreword.machine import VARIABLE, default_threads, num_processors
from foreword.names import advice
from foreword.settings import Setting

TABLE = option_settings()
SETTINGS = {name: known for group in TABLE.values() for name, known in group.items()}
"""Every option of an engine, and the model."""
OF_EXECUTORS = executor_settings()


def _known_models() -> list[str]:
    """Return the names for the completion of a shell."""
    from foreword.models.registry import KNOWN  # takes 0.04 s to import, which no other command needs

    return list(KNOWN)


def option(
    name: str, *flags: str, among: Mapping[str, Setting] = SETTINGS, heading: str | None = None, default: Any = None
) -> Any:
    """Return what Typer needs for the option of a setting. Raise ConfigError, when the command runs, for a wrong value.

    default: shown in the help.
    """
    known = among[name]
    named = replace(known, name=flags[0][2:].replace("-", "_") if flags else name, optional=False)
    help = _help(known, OF_EXECUTORS.get(name, {}) if known is SETTINGS.get(name) else {}, default)
    return typer_option(named, named.read, help, *flags, heading=heading)


def typer_option(
    known: Declared, read: Callable[[Any], Any], help: str, *flags: str, heading: str | None = None
) -> Any:
    """Return what Typer needs for an option. read: makes the value of what was given, which is not None.

    The message of a wrong value is that of ``read``: the same from Python, a command line, a variable and a file.
    """
    flag, is_flag = f"--{known.name.replace('_', '-')}", known.type == "bool"

    def take(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except ConfigError as error:
            raise ConfigError(_source(context, parameter) + str(error)) from None

    return typer.Option(
        *(flags or (f"{flag}/--no-{flag[2:]}" if is_flag else flag,)),
        metavar=None if is_flag else known.form,
        help=help,
        rich_help_panel=heading,
        show_default=False,
        parser=None if is_flag else lambda value: value,
        callback=take,
        autocompletion=_known_models if known.name == "model" else None,
    )


def _source(context: typer.Context, parameter: typer.CallbackParam) -> str:
    """Return the beginning of a message about a value that is not on the command line: the place where it is given."""
    source = context.get_parameter_source(str(parameter.name))
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return ""
    return f"{parameter.envvar if source.name == 'ENVIRONMENT' else context.params.get('config')}: "


def option_type(known: Declared) -> Any:
    """Return the annotation of an option, whose help is read later."""
    one = {"int": int, "float": float, "bool": bool}.get(known.type, str)
    return one if known.kind.collect is None else list[str]


def _help(known: Setting, kinds: Mapping[str, Setting], default: Any) -> str:
    if not kinds:
        return summary(known, default)
    alike: dict[str, list[str]] = {}  # text → kinds of executors
    for kind, one in kinds.items():
        alike.setdefault(summary(one, one.default if default is None else default), []).append(kind)
    return " ".join(f"{', '.join(names)}: {text}" for text, names in alike.items())


def summary(known: Declared, default: Any) -> str:
    """Return the help of an option: its meaning, its choices and its default."""
    if default is None:
        text = known.help.replace(". None: ", ". Default: ").replace("None: ", "default: ")
    else:
        text = re.sub(r"[;.] None: [^.;]*", "", known.help)
    if known.choices:
        text += f" One of {', '.join(known.choices)}."
    if default in (None, (), ""):
        return text
    return f"{text} [default: {str(default).lower() if known.type == 'bool' else known.text_of(default)}]"


def options_of(
    headings: Mapping[str, Mapping[str, Setting]], defaults: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, tuple[Any, object]]:
    """Return the options of a `Group` for settings, by their headings. defaults: replace those of the settings."""
    found: dict[str, tuple[Any, object]] = {}
    for heading, group in headings.items():
        for name, known in group.items():
            default = defaults.get(name, known.default)
            flags = ("--model", "-m") if name == "model" else ()
            info = option(name, *flags, among=group, heading=heading, default=default)
            found[name] = Annotated[option_type(known) | None, info], None
    return found


def values_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that the user gave."""
    return {name: value for name, value in given.items() if value not in (None, [], ())}


TABLES = f"{__name__}.tables"
"""The key under which the context of a command stores the tables of its file, a list of dictionaries."""


def _read_file(context: typer.Context, file: Path | None, *, tables: str | None = None) -> Path | None:
    """Take the values of a TOML file for options that neither the command line nor a variable has.

    tables: the name of tables that the command reads itself, see `TABLES`; None: of none.
    """
    if file is None or context.resilient_parsing:
        return file
    options = option_names(context.command)
    context.default_map = {}
    for name, value in read_toml(file).items():
        if name == tables and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            context.meta[TABLES] = value
            continue
        if name not in options or name == "config":
            fix = advice(name, options.keys() - {"config"}, f"`{context.command_path} --help` lists the names.")
            raise ConfigError(f"{file}: {name:.200}: unknown setting. {fix}")  # no value: it may be a secret
        is_list, is_flag = options[name].multiple, options[name].is_flag
        kinds = (list,) if is_list else (str, int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) != is_flag:
            expected = "a list" if is_list else "true or false" if is_flag else "a text or a number"
            reason = f"{setting_text(name, value)}: expected {expected}"
            try:
                if not is_list and not is_flag:
                    options[name].process_value(context, value)
            except ConfigError as error:  # that of `typer_option`, which has the choices or the range
                reason = str(error)
            except (typer.BadParameter, TypeError, ValueError):
                pass
            raise ConfigError(f"{file}: {reason}")
        context.default_map[options[name].name] = value
    return file


def read_toml(file: Path) -> dict[str, Any]:
    """Return the lines of a TOML file. Raise ConfigError for another file."""
    try:
        text = read_bytes(file, ConfigError).decode()
        for found in _TOKEN.finditer(text):
            if found["long"] is not None:  # each costs its length in time for each line below it
                line = text.count("\n", 0, found.start()) + 1
                raise ValueError(f"a key of more than {_MOST_PARTS} parts at line {line}")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "the values nest too deeply"
    except ValueError as error:  # also an integer of thousands of digits
        reason = str(error)
    raise ConfigError(f"{file}: not valid TOML ({reason})")


_MOST_PARTS = 32
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
_DOTTED = rf"(?:[ \t]*+\.[ \t]*+{_PART})"
_TOKEN = re.compile(
    r"#[^\n]*+"
    r"""|"{3}(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:"{3})?|'{3}(?:[^']|'(?!''))*+(?:'{3})?"""
    rf"|(?P<long>{_PART}{_DOTTED}{{{_MOST_PARTS}}})|{_PART}{_DOTTED}*+"
)
"""The parts of a TOML file that can have dots between words: comments, texts of several lines, values, keys."""


Json = Annotated[bool, typer.Option("--json", help="Print JSON, one result per line.")]
Threads = Annotated[int | None, option("num_threads")]


G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Group(Generic[G]):
    """Options that become one value of a command: name → (annotation, default), and a function that makes the value."""

    options: Mapping[str, tuple[Any, object]]
    make: Callable[..., G]


def grouped(**groups: Group[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace parameters of a command, which have these names, each by the options of its group."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            made = {
                name: group.make(**{option: given.pop(option) for option in group.options})
                for name, group in groups.items()
            }
            command(**given, **made)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in groups]
        parameters += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for group in groups.values()
            for option, (annotation, default) in group.options.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, the given options of `LLM`, and the form of the results."""

    model: str
    settings: LLMOptions
    as_json: bool = False

    @property
    def lora(self) -> str | None:
        """Return the adapter that answers: the last given one."""
        return next(reversed(list(self.settings.get("loras") or {})), None)

    def seeded(self, seed: int | None) -> LLMOptions:
        """Return the options with the seed of a command's sampling options; None: other tokens in each run."""
        return {**self.settings, "seed": seed}


def config_option(tables: str | None = None) -> tuple[Any, object]:
    """Return the option of a TOML file. tables: the name of tables that the command reads itself."""
    also = f", and a [[{tables}]] table for each {tables}" if tables else ""
    option = typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_with_tables(tables),
        help=f"A TOML file with values of options, such as max_num_seqs = 8{also}.",
    )
    return Annotated[Path | None, option], None


def _with_tables(tables: str | None) -> Callable[[typer.Context, Path | None], Path | None]:
    def read(context: typer.Context, file: Path | None) -> Path | None:  # Typer reads the signature
        return _read_file(context, file, tables=tables)

    return read


JSON: tuple[Any, object] = (Json, False)
LISTS = {"logits_processor": "logits_processors", "observer": "observers", "tier": "tiers"}
"""Options that can be given several times → the name of their list in `LLM`."""


def engine_options(
    only: Collection[str] = SETTINGS.keys(),
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    has_json: bool = False,
    tables: str | None = None,
) -> Group[ModelOptions]:
    """Return the options of a model and its engine.

    only, without: names of settings. defaults: the command's, where they differ. has_json: with --json. tables: see
    `config_option`.
    """
    headings = {
        heading: {name: known for name, known in group.items() if name in only and name not in without}
        for heading, group in TABLE.items()
    }

    def make(config: Path | None = None, as_json: bool = False, **given: Any) -> ModelOptions:
        values = {**defaults, **values_given(given)}
        model = values.pop("model", SETTINGS["model"].default)
        if adapters := values.pop("adapter", ()):
            values["loras"] = named_paths(adapters)
        values = {LISTS.get(name, name): value for name, value in values.items()}
        warn_of_threads(values.get("num_threads"))
        return ModelOptions(model, cast(LLMOptions, values), as_json)

    options = (
        {"config": config_option(tables)} | ({"as_json": JSON} if has_json else {}) | options_of(headings, defaults)
    )
    return Group(options, make)


def warn_of_threads(num_threads: int | None) -> None:
    """Say it if there will be more threads than processors, which makes a step slower by orders of magnitude.

    num_threads: as it was given; None: the default.
    """
    threads, usable = num_threads or default_threads(), num_processors()
    if threads > usable:
        given = f"--num-threads {threads}" if num_threads else f"{VARIABLE}={threads}"
        note(f"{given}: this process may use {usable} processors, and threads wait for each other; give at most that")


EXECUTOR = ("model", *TABLE["Executor"])
with_engine_options = grouped(options=engine_options(EXECUTOR, has_json=True))
"""The options of a benchmark that sets all other options itself: ``options`` is the model, the options of its executor
and --json."""


def chosen_model(context: typer.Context, argument: str | None, option: str) -> str:
    """Return the model of a command that takes it as an argument or an option. BadParameter if both are given."""
    if argument is None:
        return option
    source = context.get_parameter_source("model")
    if source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(f"{option!r}: the argument names {argument!r} too; give one", param_hint="--model")
    return argument


def source_of(context: typer.Context, name: str) -> str:
    """Return the source of the value of a parameter: "DEFAULT", "COMMANDLINE", "ENVIRONMENT" or "DEFAULT_MAP"."""
    source = context.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name


def check_used(context: typer.Context, names: Collection[str], needed: str) -> None:
    """Raise BadParameter for parameters that were given and that do nothing without ``needed``."""
    for name in names:
        if source_of(context, name) != "DEFAULT":
            flag = max(next(one.opts for one in context.command.params if one.name == name), key=len)
            raise typer.BadParameter(f"it does nothing {needed}; leave it out.", param_hint=flag)


def not_nan(value: float | None) -> float | None:
    """Refuse NaN, which the range of a number does not refuse. It is a callback of options."""
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


def counts(option: str, text: str, most: int, *, least: int = 1) -> list[int]:
    """Parse integers in [least, most] that are separated by commas. Raise ConfigError, which names the option, for
    anything else.
    """
    try:
        found = list(map(int, text.split(",")))
    except ValueError:
        found = [least - 1]
    if not all(least <= count <= most for count in found):
        above = "above zero" if least == 1 else f"from {least}"
        raise ConfigError(
            f"{option} {text!r:.80}: must be whole numbers {above}, at most {most}, separated by commas, such as 1,8"
        )
    return found


def names(option: str, text: str, known: Collection[str]) -> list[str]:
    """Return the names in a text, separated by commas. Raise ConfigError, which names the option, for one that is not
    known.
    """
    found = text.split(",")
    for name in found:
        if name not in known:
            raise ConfigError(f"{option} {name!r}: must be of {', '.join(known)}")
    return found


class Result(Protocol):
    """A dataclass; its fields are the keys of the JSON form."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


R = TypeVar("R", bound=Result)


def show(results: Iterable[R], line: Callable[[R], str], *, as_json: bool, header: Sequence[str] = ()) -> list[R]:
    """Print each result as soon as it is measured, as JSON or as a line below the header. Returns all of them."""
    shown: list[R] = []
    if not as_json:
        for text in header:
            print(text)
    for result in results:
        print(json.dumps(asdict(result)) if as_json else line(result), flush=True)
        shown.append(result)
    return shown
