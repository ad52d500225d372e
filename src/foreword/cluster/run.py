"""Run `foreword serve` with several replicas."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

from foreword.cluster.app import ProcessFront
from foreword.cluster.cluster import Cluster
from foreword.engine.options import LLMOptions
from foreword.server.config import ServerConfig
from foreword.server.listener import AppServer, limited_end, serve
from foreword.server.run import allow_connections, announce, bound_socket


def run_cluster(model: str, config: ServerConfig, options: LLMOptions) -> None:
    """Serve a model with ``config.replicas`` processes until SIGTERM or SIGINT. SIGHUP replaces them one by one.

    options: those of `AsyncLLM`; the default of num_threads is the number of cores divided by the number of replicas.
    Raise OSError if the address cannot be used, before any replica is started, and ConfigError if a replica cannot be
    started.
    """
    config.check_files()
    allow_connections()
    with bound_socket(config.host, config.port) as sock, limited_end(config) as begin_end:
        cluster = Cluster(model, config, options)
        serve(_Server(model, cluster, config, sock, begin_end), sock)


class _Server(AppServer):
    """A server that starts the replicas before it listens, and ends them after the last request."""

    def __init__(
        self, model: str, cluster: Cluster, config: ServerConfig, sock: socket.socket, on_end: Callable[[], None]
    ) -> None:
        name, many = (config.served_model_name or (model,))[0], f"{config.replicas} replicas"
        super().__init__(
            ProcessFront(cluster).behind_gate(config),
            config,
            sock,
            lambda url: announce(f"{name} at {url}, {many}", config),
            on_end,
            logs_end=True,
        )
        self._cluster = cluster

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        starting = asyncio.create_task(self._cluster.start())
        while not starting.done():
            if self.should_exit:
                starting.cancel()
            await asyncio.wait((starting,), timeout=0.1)
        if starting.cancelled():
            return
        starting.result()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._cluster.replace_all)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._cluster.close()
