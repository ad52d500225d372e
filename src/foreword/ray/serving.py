"""An application of Ray Serve: one ingress with the server's keys, limits and routes, and replicas of the engine.

HTTP ──▶ Ingress: Gate, routes about all replicas ──▶ ForewordRouter ──▶ Engine: AsyncLLM, the server's application

from foreword.ray.serving import application
serve.run(application("smollm2", num_replicas=2))
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Unpack

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Scope, Send

from foreword import __version__
from foreword.cluster.front import LOST, Front
from foreword.cluster.prompts import pieces_of
from foreword.engine.async_llm import AsyncLLM
from foreword.engine.loras import named_paths
from foreword.engine.options import LLMOptions, with_threads
from foreword.errors import ConfigError
from foreword.ray.adapters import Adapters
from foreword.ray.scaling import PRESSURE, WAITING, policy
from foreword.ray.version import check_version
from foreword.server.adapter_routes import LOAD
from foreword.server.app import make_app
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.server.context import Context
from foreword.server.errors import HttpError
from foreword.server.failures import FULL, REPLICA_LOST
from foreword.server.replicas import CALL_SECONDS, Called

Answered = tuple[str, int, bytes]
"""The name of a replica, status and body."""

BROADCAST_SECONDS = 30.0  # at least: Ray may start a worker first


class Engine:
    """A replica: an engine, and the server's application in the same process, called without a socket.

    version: of the package that deployed it; another one here is a ConfigError.
    """

    async def __init__(  # type: ignore[misc]
        self, model: str, config: ServerConfig, options: LLMOptions, version: str
    ) -> None:
        check_version(version)
        replica = serve.get_replica_context()
        names, loras = config.served_model_name or (model,), named_paths(config.adapter)
        given: LLMOptions = {**ENGINE_DEFAULTS, **options, "loras": loras, "media": config.media}
        self._llm = AsyncLLM(model, **given)
        context = Context(
            engine=self._llm, tokenizer=self._llm.tokenizer, media=self._llm.media, names=names, config=config
        )
        self._app, self._name = make_app(context), replica.replica_id.unique_id
        for name, body in (await Adapters(replica.app_name).all()).items():
            _, status, answer = await self.call(LOAD.method, LOAD.path, msgspec.json.encode(body))
            if status != 200:
                raise ConfigError(f"adapter {name!r:.80}: {msgspec.json.decode(answer)['error']['message']}; unload it")

    async def answer(
        self, scope: dict[str, Any], body: bytes, num_tokens: int = 1, pieces: Sequence[int] = ()
    ) -> AsyncGenerator[Message, None]:
        """Yield the messages of the response of the server's application. Closing the generator cancels the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
        is_gone = asyncio.Event()
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            await self._app(scope, receive, messages.put)
            await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            is_gone.set()
            while not task.done():  # it may want to say more
                if not messages.empty():
                    messages.get_nowait()
                await asyncio.sleep(0)
            await task

    async def call(self, method: str, path: str, body: bytes = b"") -> Answered:
        """Return the name of the replica, status and body of a short request."""
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
            "http_version": "1.1",
            "scheme": "http",
        }
        messages = [message async for message in self.answer(scope, body)]
        return self._name, messages[0]["status"], b"".join(message.get("body", b"") for message in messages)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the pressure when Ray Serve calls it: see `foreword.ray.scaling`."""
        scheduler, cache = self._llm.engine.scheduler, self._llm.engine.cache
        used = max(cache.pool.usage, cache.state_pool.usage, len(scheduler.running) / scheduler.config.max_num_seqs)
        return {WAITING: float(len(scheduler.waiting)), PRESSURE: used}

    def check_health(self) -> None:
        """Raise if the engine has failed, when Ray Serve calls it, which then replaces the replica."""
        if self._llm.is_closed:
            raise RuntimeError("the engine is closed")


class RayFront(Front):
    """The front end of engines that Ray Serve runs."""

    def __init__(self, engines: DeploymentHandle, adapters: Adapters) -> None:
        super().__init__()
        self._engines, self._adapters = engines, adapters

    async def pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        num_tokens, pieces = await pieces_of(scope, body) if scope["method"] == "POST" else (1, [])
        names = ("type", "method", "path", "raw_path", "query_string", "http_version", "scheme", "client", "server",
                 "requester")  # fmt: skip
        inner: dict[str, Any] = {name: scope[name] for name in names if name in scope}
        inner["headers"] = self.passed_headers(scope)
        for is_last in (False, True):
            answers = self._engines.options(stream=True).answer.remote(
                inner, body, num_tokens=num_tokens, pieces=pieces
            )
            is_begun = False
            try:
                async for message in answers:
                    if message["type"] == "http.response.start":
                        names_sent = (b"x-request-id", b"date")
                        message["headers"] = [h for h in message.get("headers", ()) if h[0] not in names_sent]
                    is_begun = True
                    await send(message)
                return
            except asyncio.CancelledError:  # the client has closed the connection
                answers.cancel()
                raise
            except BackPressureError:
                raise HttpError(FULL, "all replicas are full", headers={"Retry-After": "1"}) from None
            except RayError:
                if is_begun or is_last:
                    again = {"Retry-After": "1"}
                    raise HttpError(REPLICA_LOST, LOST, headers=again) from None

    async def call_all(self, method: str, path: str, body: object = None, *, seconds: float = CALL_SECONDS) -> Called:
        data = b"" if body is None else msgspec.json.encode(body)
        return [
            (name, status, msgspec.json.decode(text))
            for name, status, text in await self._broadcast(method, path, data, seconds)
        ]

    async def fetch_of(self, name: str, path: str, *, seconds: float = CALL_SECONDS) -> tuple[int, bytes] | None:
        found = await self._broadcast("GET", path, b"", seconds)  # a call of one replica by name is not offered
        return next(((status, text) for other, status, text in found if other == name), None)

    async def pages(self) -> Iterable[tuple[str, str]]:
        found = await self._broadcast("GET", "/metrics", b"")
        return [(name, text.decode()) for name, status, text in found if status == 200]

    async def states(self) -> list[dict[str, Any]]:
        found = await self._broadcast("GET", "/ready", b"")
        return [{"replica": name, "ready": True} for name, status, _ in found if status == 200]

    async def adapters(self) -> Mapping[str, dict[str, Any]]:
        return await self._adapters.all()

    async def keep_adapter(self, name: str, body: dict[str, Any] | None) -> None:
        await self._adapters.keep(name, body)

    async def _broadcast(self, method: str, path: str, body: bytes, seconds: float = CALL_SECONDS) -> list[Answered]:
        try:
            found: list[Answered] = await self._engines.broadcast("call", method, path, body).results_async(
                timeout_s=max(seconds, BROADCAST_SECONDS)
            )
        except (RayError, TimeoutError) as error:
            raise HttpError(REPLICA_LOST, f"a replica did not answer: {type(error).__name__}") from None
        return found


class Ingress:
    """The deployment that Ray Serve's proxies send HTTP requests to."""

    def __init__(self, engines: DeploymentHandle, config: ServerConfig) -> None:
        self._engines, self._config = engines, config

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return RayFront(self._engines, Adapters(serve.get_replica_context().app_name)).behind_gate(self._config)


def application(
    model: str,
    config: ServerConfig | None = None,
    *,
    num_replicas: int | tuple[int, int] = 1,
    num_cpus: float = 1.0,
    autoscaling: Mapping[str, Any] | None = None,
    **options: Unpack[LLMOptions],
) -> serve.Application:
    """Return a model on replicas of the engine, with the routes of `foreword serve`.

    config: of `foreword serve`; host, port and certificates are Ray Serve's. num_replicas: or (least, most), between
    which Ray scales by `foreword.ray.scaling`; autoscaling: further fields of Ray's AutoscalingConfig, such as delays.
    num_cpus: of a replica, in Ray's accounts and as threads. options: of `AsyncLLM`.
    """
    config = config or ServerConfig()
    if config.slot_save_path is not None:
        raise ConfigError("slot_save_path: slots belong to one process, and Ray has replicas; give cache_dir instead")
    if config.kv_events is not None or config.tls_certificate is not None:
        raise ConfigError(
            "kv_events, tls_certificate: are not supported on Ray, where replicas have no fixed addresses; leave them "
            "out"
        )
    if config.data_directory is not None:
        raise ConfigError("data_directory: is not supported on Ray, where batches are not answered; leave it out")
    if config.key_limit:
        raise ConfigError("key_limit: is not supported on Ray, whose replicas do not count together; leave it out")
    inner = config.behind_front(api_key=(), admin_key=None, require_key=False, allowed_host=("*",))
    router = RequestRouterConfig(
        request_router_class="foreword.ray.router:ForewordRouter", request_router_kwargs={"router": config.router}
    )
    settings: dict[str, Any] = {"num_replicas": num_replicas}
    if isinstance(num_replicas, tuple):
        least, most = num_replicas
        rule = AutoscalingPolicy(policy_function=policy)
        settings = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least, max_replicas=most, policy=rule, **dict(autoscaling or {})
            )
        }
    engine = serve.deployment(Engine).options(
        name="Engine",
        max_ongoing_requests=2 * config.max_requests,  # the engine refuses those above max_requests itself
        ray_actor_options={"num_cpus": num_cpus},
        graceful_shutdown_timeout_s=config.drain_timeout,
        request_router_config=router,
        **settings,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress", max_ongoing_requests=16 * config.max_requests, ray_actor_options={"num_cpus": 0}
    )
    engines = engine.bind(model, inner, with_threads(options, max(int(num_cpus), 1)), __version__)
    return ingress.bind(engines, config)
