"""`foreword serve`: an HTTP server for models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foreword.cli.options import (
    TABLES,
    Group,
    ModelOptions,
    chosen_model,
    engine_options,
    grouped,
    options_of,
    source_of,
    values_given,
)
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.settings import settings_of


def _config(**given: Any) -> ServerConfig:
    return ServerConfig(**values_given(given))


SERVER = Group(options_of({"Server": settings_of(ServerConfig)}), _config)
ENGINE = engine_options(without=("adapter",), defaults=ENGINE_DEFAULTS, tables="model")


@grouped(engine=ENGINE, server=SERVER)
def serve(
    context: typer.Context,
    model_argument: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="The models, in place of --model.", show_default=False),
    ] = None,
    *,
    engine: ModelOptions,
    server: ServerConfig,
) -> None:
    """Serve models to clients of OpenAI, Anthropic and Ollama over HTTP.

    Each option may also be a line of a TOML file (max_requests = 64) or an environment variable
    (FOREWORD_SERVE_MAX_REQUESTS=64). The command line takes precedence over variables, and variables over the file.
    Several models are arguments, [[model]] tables of the file, or a directory; a request names one as its model.
    SIGTERM or Ctrl-C: no new requests, those in progress are finished. SIGHUP: new processes replace the replicas.
    """
    from foreword.server.run import check_packages, run

    given = model_argument or []
    model = chosen_model(context, next(iter(given), None), engine.model)
    check_packages()
    if len(given) > 1 or server.of_several or TABLES in context.meta:
        from foreword.cli.served_models import served_models
        from foreword.server.run_several import run_several

        has_others = server.models_dir is not None or TABLES in context.meta
        if not given and not (has_others and source_of(context, "model") == "DEFAULT"):
            given = [model]
        served = served_models(given, context.meta.get(TABLES, []), server, engine.settings)
        run_several(served, server, engine.settings)
    elif server.replicas == 1:
        run(model, server, **engine.settings)
    else:
        from foreword.cluster.run import run_cluster

        run_cluster(model, server, engine.settings)
    from foreword.server.listener import end_process_if_stuck

    end_process_if_stuck()
