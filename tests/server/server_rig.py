"""A server in a thread, with a tiny model whose answers can be predicted."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from talking_model import END, TEMPLATE, VOCAB

from computing import replace_compute
from foreword.engine.async_llm import AsyncLLM
from foreword.server.config import ServerConfig
from foreword.server.context import Context
from foreword.server.listener import Server
from foreword.server.run import bound_socket, with_slots

PATIENCE = 60.0
HI = [{"role": "user", "content": "Hi"}]


class Serving:
    """A running server. pace: seconds that each step of the model takes at least."""

    def __init__(self, llm: AsyncLLM, context: Context, url: str) -> None:
        self.llm, self.context, self.url = llm, context, url
        self.steps, self.pace = 0, 0.0
        self._open = threading.Event()
        self._open.set()
        compute = llm.engine.executor.compute

        def held(batch, logits_indices):
            assert self._open.wait(PATIENCE)
            self.steps += 1
            time.sleep(self.pace)
            return compute(batch, logits_indices)

        replace_compute(llm.engine.executor, held)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The model does not compute within the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextmanager
    def context_is_full(self) -> Iterator[None]:
        """All places are taken within the block."""
        place = self.context.admission.enter(self.context.config.max_requests)
        try:
            yield
        finally:
            place.leave()

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **options)

    def post(self, path: str, body: object, **options) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def later(self, path: str, body: object, **options) -> Future[httpx.Response]:
        """The answer to a request that a thread of its own sends."""
        answer: Future[httpx.Response] = Future()
        send = lambda: answer.set_result(self.post(path, body, **options))  # noqa: E731
        threading.Thread(target=send, daemon=True).start()
        return answer

    def get(self, path: str, **options) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def frames(self, path: str, body: dict) -> list[dict]:
        """The JSON values of a stream, whose last frame is [DONE]."""
        with self.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
            response.read()
            assert response.status_code == 200, response.text
            return frames_of(response.text)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.002)

    def check_nothing_is_left(self) -> None:
        """No request, block or place is in use."""
        self.wait_until(lambda: not self.llm.engine.has_work and not self.llm.num_unfinished)
        self.wait_until(lambda: not self.context.admission.num_requests)
        assert self.context.admission.num_prompt_tokens == 0
        assert self.llm.engine.cache.pool.num_used == 0


def frames_of(text: str) -> list[dict]:
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame.startswith("data: ")]
    assert frames[-1] == "[DONE]", frames[-1:]
    return [json.loads(frame) for frame in frames[:-1]]


@contextmanager
def serving(
    model: Path, *, script: str | None = None, engine: dict | None = None, send_buffer: int = 0, **settings
) -> Iterator[Serving]:
    """A server of the tiny model. script: every answer is this text. send_buffer: bytes that a socket holds, 0: the
    system's choice. settings: of `ServerConfig`.
    """
    config = ServerConfig(port=0, **settings)
    slots, options = with_slots(config, {"executor": "numpy", "max_model_len": 4096, **(engine or {})})
    llm = AsyncLLM(str(model), media=config.media, **options)
    if slots is not None:
        slots.attach(llm.engine)
    if script is not None:
        recite(llm, script)
    names = "talker", "other"
    context = Context(engine=llm, tokenizer=llm.tokenizer, media=llm.media, names=names, config=config, slots=slots)
    sock: socket.socket = bound_socket(config.host, config.port)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    ready = threading.Event()
    server = Server(context, sock, lambda url: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield Serving(llm, context, server.url)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
        asyncio.run(llm.close())


@contextmanager
def beside_the_browser(model: Path, **options) -> Iterator[Serving]:
    """A server that starts and ends in another thread: a browser has an event loop in this one."""
    manager = serving(model, **options)
    with ThreadPoolExecutor(1) as other:
        server = other.submit(manager.__enter__).result()
        try:
            yield server
        finally:
            other.submit(manager.__exit__, None, None, None).result()


def recite(llm: AsyncLLM, text: str) -> None:
    """Every answer is the text, then the end."""
    tokens = [*text.encode(), END]
    compute = llm.engine.executor.compute

    def scripted(batch, logits_indices):
        logits = compute(batch, logits_indices)
        states = batch.states
        logits[:] = 0
        places = np.searchsorted(batch.query_start_loc[1:], logits_indices, side="right").tolist()
        for i, b in enumerate(places):
            row = batch.idx_mapping[b]
            at = int(states.num_tokens[row]) - int(states.prompt_len[row]) + i - places.index(b)  # behind its drafts
            logits[i, tokens[min(at, len(tokens) - 1)]] = 50
        return logits

    replace_compute(llm.engine.executor, scripted)


def with_template(model: Path, folder: Path, template: str | None) -> Path:
    """A copy of the model with another chat template; None: without one."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings = {**settings, "chat_template": template} if template is not None else {"eos_token": settings["eos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


__all__ = [
    "HI",
    "TEMPLATE",
    "VOCAB",
    "Serving",
    "beside_the_browser",
    "frames_of",
    "recite",
    "serving",
    "with_template",
]
