"""`foreword serve`: an HTTP server for a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from foreword.cli.options import EngineOptions, Group, chosen_model, engine_options, grouped, options_of, values_given
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.settings import settings_of


def _config(**given: Any) -> ServerConfig:
    return ServerConfig(**values_given(given))


SERVER = Group(options_of({"Server": settings_of(ServerConfig)}), _config)
ENGINE = engine_options(without=("adapter",), defaults=ENGINE_DEFAULTS)


@grouped(engine=ENGINE, server=SERVER)
def serve(
    context: typer.Context,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, in place of --model.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    server: ServerConfig,
) -> None:
    """Serve a model to OpenAI's clients over HTTP.

    Each option may also be a line of a TOML file (max_requests = 64) or an environment variable
    (FOREWORD_SERVE_MAX_REQUESTS=64). The command line takes precedence over variables, and variables over the file.
    SIGTERM or Ctrl-C: no new requests, those in progress are finished. SIGHUP: new processes replace the replicas.
    """
    from foreword.server.run import check_packages, run

    model = chosen_model(context, model_argument, engine.model)
    check_packages()
    if server.replicas == 1:
        run(model, server, **engine.settings)
    else:
        from foreword.cluster.run import run_cluster

        run_cluster(model, server, engine.settings)
    from foreword.server.listener import end_process_if_stuck

    end_process_if_stuck()
