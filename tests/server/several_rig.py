"""A server of several models in a thread."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from foreword.server.config import ServerConfig
from foreword.server.models import Models
from foreword.server.run import bound_socket
from foreword.server.run_several import SeveralServer, several
from foreword.server.served import ServedModel

PATIENCE = 60.0


class Several:
    """models: to be read only; the event loop of the server changes them."""

    def __init__(self, models: Models, url: str) -> None:
        self.models, self.url = models, url
        self.client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    @property
    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.get("/v1/models").json()["data"] if one["id"] == one["root"]}


@contextmanager
def serving_several(served: Sequence[ServedModel], **settings) -> Iterator[Several]:
    config = ServerConfig(port=0, **settings)
    models, sock, ready = several(served, config), bound_socket("127.0.0.1", 0), threading.Event()
    server = SeveralServer(models, sock, lambda url: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE
    while not ready.wait(0.05):
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < until
    found = Several(models, server.url)
    try:
        yield found
    finally:
        found.client.close()
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
