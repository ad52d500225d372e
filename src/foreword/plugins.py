"""Parts that other packages bring: named by an entry point of an installed package, or as module:name."""

from __future__ import annotations

from importlib import import_module

from foreword.names import advice


def load_plugin(group: str, name: str) -> object:
    """Return what a text names: "module:name", or the entry point of that name in group "foreword.<group>".

    ValueError, with the reason, if there is none or it cannot be imported.
    """
    from importlib.metadata import entry_points  # here: it is slow to import, and only plug-ins need it

    if ":" in name:
        module, _, path = name.partition(":")
        try:
            found: object = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"cannot be imported ({error})") from None
        return found
    announced = entry_points(group=f"foreword.{group}")
    for point in announced:
        if point.name == name:
            try:
                return point.load()
            except (ImportError, AttributeError) as error:
                raise ValueError(f"the entry point {point.value} cannot be imported ({error})") from None
    names = ", ".join(sorted(announced.names)) or "none"
    fix = advice(name, announced.names, "Give module:name, or install the package that announces it.")
    raise ValueError(f"installed packages announce {names} in foreword.{group}. {fix}")
