"""The models of `foreword serve` with several: arguments, [[model]] tables of its file, a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from foreword.cli.options import LISTS, SETTINGS
from foreword.engine.loras import named_paths
from foreword.engine.options import LLMOptions
from foreword.errors import ConfigError
from foreword.names import advice
from foreword.server.config import ServerConfig
from foreword.server.served import ServedModel, models_in
from foreword.settings import Setting

# fmt: off
OWN = {
    known.name: known
    for known in (
        Setting(name="name", type="Sequence[str]", default=(), help="Names of the model in requests."),
        Setting(name="pin", type="bool", default=False, help="Whether it is never unloaded."),
        Setting(name="keep_alive", type="float", optional=True,
                help="Seconds for which it stays loaded without requests."),
    )
}
"""Keys of a [[model]] table that are no options of an engine."""
# fmt: on


def served_models(
    models: Sequence[str], tables: Sequence[Mapping[str, Any]], server: ServerConfig, options: LLMOptions
) -> list[ServedModel]:
    """Return the models of a server, which `checked` has not seen. options: of the engines of all, in place of which a
    table has its own. Raise ConfigError for what a table cannot have, with its number.
    """
    common, keep_alive = frozenset(options), server.model_keep_alive
    found = [
        ServedModel(model=model, names=(model,), options=options, common=common, keep_alive=keep_alive)
        for model in models
    ]
    found += [_of_table(i, table, server, options) for i, table in enumerate(tables)]
    if server.models_dir is not None:
        found += models_in(server.models_dir, options, server.model_keep_alive)
    return found


def _of_table(index: int, table: Mapping[str, Any], server: ServerConfig, options: LLMOptions) -> ServedModel:
    values = dict(_values(index, table))
    if "model" not in values:
        raise ConfigError(f'model[{index}]: has no model. Give model = "…", what `foreword serve` takes')
    model, names = values.pop("model"), values.pop("name", ())
    pin, keep_alive = values.pop("pin", False), values.pop("keep_alive", server.model_keep_alive)
    if adapters := values.pop("adapter", ()):
        values["loras"] = named_paths(adapters)
    own = cast(LLMOptions, {LISTS.get(name, name): value for name, value in values.items()})
    return ServedModel(
        model=model,
        names=tuple(names) or (model,),
        options={**options, **own},
        common=frozenset(options.keys() - own.keys()),
        pin=pin,
        keep_alive=keep_alive,
    )


def _values(index: int, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = {**SETTINGS, **OWN}
    for name, value in table.items():
        if name == "record" or name not in known:
            fix = advice(name, known, "It may have options of the engine, name, pin and keep_alive.")
            raise ConfigError(f"model[{index}].{name:.200}: unknown setting. {fix}")  # no value: it may be a secret
        try:
            is_text = name == "name" and isinstance(value, str)
            yield name, known[name].read([value] if is_text else value)
        except ConfigError as error:
            raise ConfigError(f"model[{index}].{error}") from None
