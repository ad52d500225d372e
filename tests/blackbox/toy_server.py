"""A small server of OpenAI's completions whose answers follow from the contents of a block cache, with faults to plant.

The key and value of a position is a number made of its token and of those that it reads before it; log-probabilities
are made of all that the last position reads. So a wrong, missing or foreign entry of the cache changes the answer.
"""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LETTERS = [f" {letter}" for letter in "abcdefghijklmnopqrst"]
STALE = 0


class Toy:
    """The behaviour of a server. fault: a name of FAULTS, or "". noise: nats by which rounding changes logprobs."""

    def __init__(self, fault: str = "", block_size: int = 16, noise: float = 0.0, logprobs: bool = True) -> None:
        self.fault, self.block_size, self.noise, self.logprobs = fault, block_size, noise, logprobs
        self.blocks: dict[tuple, int] = {}  # key → number of its place
        self.places: list[tuple[tuple, tuple[int, ...]]] = []  # key and entries of each block
        self.next_place, self.num_places = 0, 10 if fault == "evict" else 1 << 20
        self.num_running, self.num_requests = 0, 0
        self.lock = threading.Lock()

    def keys(self, tokens: list[str], salt: str, model: str) -> Iterator[tuple]:
        S, parent = self.block_size, ("",)
        for begin in range(0, len(tokens) - S + 1, S):
            own = tuple(tokens[begin : begin + S])
            if begin == 0:
                extra = ("" if self.fault == "salt" else salt, "" if self.fault == "model" else model)
            else:
                extra = ()
            parent = (own, extra) if self.fault == "parent" else (hash(parent), own, extra)
            yield parent

    def entry(self, token: str, before: list[int], model: str) -> int:
        return hash((token, model, tuple(before))) or 1

    def next_token(self, entries: list[int]) -> tuple[str, dict[str, float]]:
        rng = random.Random(hash(tuple(entries)))
        weights = [rng.random() ** 4 for _ in LETTERS]
        jitter = random.uniform(-self.noise, self.noise)
        logs = {t: -5 * (1 - w) + jitter * (i % 2) for i, (t, w) in enumerate(zip(LETTERS, weights, strict=True))}
        top = dict(sorted(logs.items(), key=lambda item: -item[1])[:5])
        return next(iter(top)), top

    def generate(self, prompt: list[str], salt: str, model: str, max_tokens: int) -> Iterator[tuple[str, dict]]:
        """First the number of cached tokens, then each token with its likeliest ones."""
        S = self.block_size
        with self.lock:
            self.num_requests += 1
            self.num_running += 1
            entries: list[int] = []
            for key in self.keys(prompt[: (len(prompt) - 1) // S * S], salt, model):
                if key not in self.blocks:
                    break
                entries += self.places[self.blocks[key]][1]
        try:
            num_cached = len(entries)
            yield num_cached, {}
            for p in range(num_cached, len(prompt)):
                is_border = num_cached and p == num_cached
                entries.append(STALE if self.fault == "border" and is_border else self.entry(prompt[p], entries, model))
            self.keep(prompt, entries, salt, model)
            tokens, is_finished = list(prompt), False
            try:
                for i in range(max_tokens):
                    if self.fault == "swap" and i == 1:
                        time.sleep(0.004)  # so that the requests of a wave run at the same time
                    token, top = self.next_token(entries)
                    if self.fault == "swap" and self.num_running > 1 and i == 1:
                        token = LETTERS[(LETTERS.index(token) + 7) % len(LETTERS)]
                    tokens.append(token)
                    yield token, top
                    entries.append(self.entry(token, entries, model))
                is_finished = True
            finally:
                if self.fault == "abort" and not is_finished:
                    entries += [STALE] * 2 * S
                    tokens += [LETTERS[0]] * 2 * S
                    entries[S // 2 : S] = [STALE] * (S // 2)
                    entries[S // 2 : len(prompt)] = [STALE] * (len(prompt) - S // 2)
                    self.keep(tokens, entries, salt, model, replaces=True)
                if self.fault == "last" and is_finished:
                    entries[-1] = STALE  # the last token was sampled and never computed
                if is_finished:
                    self.keep(tokens, entries, salt, model)
        finally:
            with self.lock:
                self.num_running -= 1

    def keep(self, tokens: list[str], entries: list[int], salt: str, model: str, replaces: bool = False) -> None:
        S = self.block_size
        with self.lock:
            for k, key in enumerate(self.keys(tokens, salt, model)):
                if not replaces and key in self.blocks:
                    continue
                if len(self.places) < self.num_places:
                    self.places.append(((), ()))
                at = self.next_place
                self.next_place = (at + 1) % self.num_places
                if self.fault != "evict" and self.blocks.get(self.places[at][0]) == at:
                    del self.blocks[self.places[at][0]]
                self.places[at] = key, tuple(entries[k * S : (k + 1) * S])
                self.blocks[key] = at

    def choices(self, prompt: list[str], body: dict) -> tuple[int, list[list[tuple[str, dict]]]]:
        salt, model, count = body.get("cache_salt", ""), body["model"], body["max_tokens"]
        first, *rest = [list(self.generate(prompt, salt, model, count)) for _ in range(body.get("n", 1))]
        if self.fault == "fork":
            rest = [[*one[:2], (LETTERS[3], {LETTERS[3]: -0.1}), *one[3:]] for one in rest]
        return first[0][0], [one[1:] for one in (first, *rest)]


FAULTS = ("parent", "salt", "model", "border", "swap", "evict", "abort", "last", "fork")


def tokens_of(text: str) -> list[str]:
    return re.findall(r" ?\S", text)


class Handler(BaseHTTPRequestHandler):
    toy: Toy

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer({"data": [{"id": "toy", "max_model_len": 600}, {"id": "adapter"}]})
        elif self.path == "/openapi.json":
            self.answer({"fields": ["cache_salt"]})
        else:
            self.answer({"error": {"message": "not found"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.answer({"error": {"message": "no such route"}}, 404)
            return
        prompt = tokens_of(body["prompt"])
        if body.get("stream"):
            self.stream(prompt, body)
            return
        num_cached, choices = self.toy.choices(prompt, body)
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": num_cached}}
        self.answer({"choices": [self.choice(one) for one in choices], "usage": usage})

    def choice(self, tokens: list[tuple[str, dict]]) -> dict:
        columns = {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [top.get(token, -9.0) for token, top in tokens],
            "top_logprobs": [top for _, top in tokens],
        }
        return {"text": "".join(token for token, _ in tokens), "logprobs": columns if self.toy.logprobs else None}

    def stream(self, prompt: list[str], body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        made = self.toy.generate(prompt, body.get("cache_salt", ""), body["model"], body["max_tokens"])
        next(made)
        try:
            for token, _ in made:
                event = {"choices": [{"text": token, "index": 0}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                time.sleep(0.001)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client has closed the connection
            made.close()


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of these answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def toy_server(toy: Toy) -> Iterator[str]:
    with running(type("ToyHandler", (Handler,), {"toy": toy})) as url:
        yield url
