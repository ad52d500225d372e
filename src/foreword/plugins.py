"""Parts that other packages bring: named by an entry point of an installed package, or as module:name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from foreword.errors import ConfigError, ForewordError, shown
from foreword.names import advice

T = TypeVar("T")


def load_plugin(group: str, name: str) -> object:
    """Return what a text names: "module:name", or the entry point of that name in group "foreword.<group>".

    Raise ValueError, with the reason, if there is none or it cannot be imported, whatever its module raises.
    """
    from importlib.metadata import entry_points  # here: it is slow to import, and only plug-ins need it

    if ":" in name:
        module, _, path = name.partition(":")
        try:
            found: object = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:
            raise ValueError(f"cannot be imported ({_text_of(error)}){_path_advice(error, module)}") from error
        return found
    announced = entry_points(group=f"foreword.{group}")
    for point in announced:
        if point.name == name:
            try:
                return point.load()
            except Exception as error:
                raise ValueError(f"the entry point {point.value} cannot be imported ({_text_of(error)})") from error
    names = ", ".join(sorted(announced.names)) or "none"
    fix = advice(name, announced.names, "Give module:name, or install the package that announces it.")
    raise ValueError(f"installed packages announce {names} in foreword.{group}. {fix}")


def made(option: str, make: Callable[..., T], *given: object, kind: type) -> T:
    """Return what a part of an option makes. Raise ConfigError, with the reason, if that is not a ``kind``."""
    try:
        part = make(*given)
    except (ForewordError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{option}={shown(make)}: cannot be made ({_text_of(error)})") from error
    if isinstance(part, type) or not isinstance(part, kind):
        raise ConfigError(f"{option}={shown(make)}: makes {shown(part)}, expected one of type {kind.__name__}")
    return part


def _path_advice(error: Exception, module: str) -> str:
    """Return the fix for a module that is not found itself, "" for another error."""
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
    return "; add the folder of the module to PYTHONPATH" if is_missing else ""


def _text_of(error: Exception) -> str:
    """Return the text of an import that failed; of other failures, their kind too."""
    return str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
