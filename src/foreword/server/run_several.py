"""The server of several models as a process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from foreword.engine.options import LLMOptions
from foreword.server.config import ServerConfig
from foreword.server.listener import ModelServer, limited_end, serve
from foreword.server.loading import Loader
from foreword.server.models import Models
from foreword.server.run import allow_connections, announce, bound_socket
from foreword.server.served import ServedModel, checked
from foreword.server.shared import Shared


def run_several(
    models: Sequence[ServedModel],
    config: ServerConfig,
    options: LLMOptions | None = None,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve models until SIGTERM or SIGINT; requests in progress are finished then, within drain_timeout.

    options: of the engines of models that are added later. on_ready: called with the address; without, it is printed.
    Raise OSError if the address cannot be used; ConfigError as `checked`; ConfigError or ModelError if a model cannot
    be loaded that does not wait for a request, before the server listens.
    """
    config.check_files()
    found = several(models, config, options)
    allow_connections()
    with bound_socket(config.host, config.port) as sock, limited_end(config) as begin_end:
        serve(SeveralServer(found, sock, on_ready, begin_end), sock)


def several(models: Sequence[ServedModel], config: ServerConfig, options: LLMOptions | None = None) -> Models:
    """Return the models of a server, none of which is loaded yet. Raise ConfigError as `checked`."""
    served, shared = checked(models, config), Shared.of(config)
    return Models(served, config, Loader(config, shared, len(models)), shared, options)


class SeveralServer(ModelServer):
    """Loads the models that do not wait for a request before it listens, and ends all after the last request."""

    def __init__(
        self,
        models: Models,
        sock: socket.socket,
        on_ready: Callable[[str], None] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        names = ", ".join(entry.name for entry in models.entries)
        notify = on_ready or (lambda url: announce(f"{names} at {url}", models.config))
        super().__init__(models, sock, notify, on_end, logs_end=on_ready is None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        starting = asyncio.create_task(self._models.start())
        while not starting.done() and not self.should_exit:
            await asyncio.wait((starting,), timeout=0.1)
        if not starting.done():
            starting.cancel()
            self._on_end()
            return
        starting.result()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._models.close()
