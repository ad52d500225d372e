"""Attacks on a running server: what each costs its neighbours, in memory and in time, and how it is answered.

    PYTHONPATH=src:tests:tests/cli python tests/server/attack.py [NAME …] [--replicas]

`foreword serve` runs in a process of its own, or as a front end with two replicas. While an attack runs, a neighbour
asks GET /health, completes short prompts and reads a stream. A row of the table has the statuses that the attack got,
the neighbour's statuses, the 99th percentile and the longest of its waits for /health, the 99th percentile of the times
between two pieces of its stream, and the growth of the processes' memory. The program ends with 1 if a server ends,
answers 500, refuses the neighbour, grows by more than `MOST_GROWTH` or lets /health wait longer than `LONGEST_WAIT`.
That bound is wide, as the machine may be slow.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
from processes import start
from server_rig import with_template
from talking_model import TEMPLATE, write_talking_model

MOST_GROWTH = (
    700 << 20
)  # bytes per process that serves: grammar_cache_bytes, and what two grammars take while they are tried
LONGEST_WAIT = 2.0  # seconds
PATIENCE = 60.0
MODEL = ("--max-model-len", 4096, "--kv-cache-bytes", 64 << 20, "--num-threads", 1, "--drain-timeout", 2,
         "--served-model-name", "talker")  # fmt: skip
CALLER = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
JSON = {"Content-Type": "application/json"}


class Server:
    """`foreword serve` in processes of its own. statuses: what it answered to the attack."""

    def __init__(self, model: Path, replicas: int) -> None:
        self.most_growth = replicas * MOST_GROWTH
        many = ("--replicas", replicas) if replicas > 1 else ()
        self.process = start("serve", model, "--port", 0, *MODEL, *many)
        line = self.process.stderr.readline().decode()
        assert " at http://" in line, line + self.process.stderr.read().decode()
        self.host, _, port = line.split(" at http://")[1].split(",")[0].strip().rpartition(":")
        self.port = int(port)
        self.log: list[str] = []
        self.statuses: Counter[object] = Counter()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.log.extend(line.decode(errors="replace") for line in self.process.stderr)

    def ask(self, method: str, path: str, body: object = None, *, timeout: float = PATIENCE, **headers: str) -> int:
        """Return the status of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, {**JSON, **headers})
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def attack(self, path: str, body: object, **options: float) -> None:
        """POST a body, and count its status or error."""
        try:
            self.statuses[self.ask("POST", path, body, **options)] += 1
        except (OSError, http.client.HTTPException) as error:
            self.statuses[type(error).__name__] += 1

    def send(self, parts: Iterator[bytes] | list[bytes], seconds: float = 10.0, *, reads: bool = True) -> None:
        """Send parts on one connection until they or the time end, or the server closes it, whatever it answers. Not
        ``reads``: read nothing until the time ends.
        """
        until = time.monotonic() + seconds
        with suppress(OSError), socket.create_connection((self.host, self.port), timeout=seconds) as connection:
            for part in parts:
                if time.monotonic() > until:
                    self.statuses["open"] += 1
                    return
                connection.sendall(part)
            if not reads:
                time.sleep(max(until - time.monotonic(), 0))
            connection.settimeout(max(until - time.monotonic(), 0.1))
            found = connection.recv(12)
            self.statuses[int(found[9:12]) if found[9:12].isdigit() else "closed"] += 1
            return
        self.statuses["closed"] += 1

    def memory(self) -> int:
        """Return the resident bytes of the process and its children."""
        pids = [self.process.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    pids += [int(child) for child in task.read_text().split()]
        return sum(resident(pid) for pid in pids)


def resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def together(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(i)`` for i < count in threads of their own."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- the attacks -------------------------------------------------------------------------------------------------------

STREAM = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
FIELDS = b"X: a\r\n" * 2000


def endless_head(server: Server) -> None:
    server.send([b"GET / HTTP/1.1\r\n", *[FIELDS] * 20000])


def head_behind_a_stream(server: Server) -> None:
    sized = b"%sContent-Length: %d\r\n\r\n%s" % (POST, len(STREAM), STREAM)
    server.send([sized, b"GET / HTTP/1.1\r\n", *[FIELDS] * 20000])


def endless_trailer(server: Server) -> None:
    server.send([POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ", *[b"a" * 60000] * 2000])


def pipelined_requests(server: Server) -> None:
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    together(40, lambda _: server.send([many] * 50))


def slow_heads(server: Server) -> None:
    def head() -> Iterator[bytes]:
        yield b"GET / HTTP/1.1\r\n"
        for _ in range(20):
            time.sleep(0.25)
            yield b"X: a\r\n"

    together(200, lambda _: server.send(head(), 5.0))


def bodies_of_digits(server: Server) -> None:
    text = "1" * 8_000_000
    server.attack("/tokenize", {"prompt": text})
    server.attack("/v1/completions", {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 10})
    server.attack("/v1/completions", {"prompt": "a", "max_tokens": 1, "bad_words": ["1" * 4_000_000]})


def all_logprobs(server: Server) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        server.attack("/v1/completions", {"prompt": "a" * 1000, "max_tokens": 2000, name: 256, "ignore_eos": True})
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2000, "ignore_eos": True}
    server.attack("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 256, "n": 16})


def logprobs_nobody_reads(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 600, "stream": True, "ignore_eos": True, "logprobs": 20}
    content = json.dumps(body).encode()
    together(
        40, lambda _: server.send([b"%sContent-Length: %d\r\n\r\n%s" % (POST, len(content), content)], 8.0, reads=False)
    )


def whole_answers_with_logprobs(server: Server) -> None:
    body = {"prompt": "a", "n": 8, "max_tokens": 1000, "ignore_eos": True, "logprobs": 20}
    together(3, lambda _: server.attack("/v1/completions", body))


def bodies_in_chunks_of_one_byte(server: Server) -> None:
    body = json.dumps({"prompt": "a" * 200_000, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    together(8, lambda _: server.send([POST + b"Transfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"], 20.0))


def messages_of_many_pieces(server: Server) -> None:
    message = {"role": "user", "content": "a"}
    server.attack("/v1/messages", {"model": "talker", "messages": [message] * 150_000, "max_tokens": 1})
    server.attack("/v1/responses", {"input": [message] * 100_000, "max_output_tokens": 1})


def many_pieces_that_are_taken(server: Server) -> None:
    message = {"role": "user", "content": "a"}
    server.attack("/v1/messages", {"model": "talker", "messages": [message] * 40_000, "max_tokens": 1})
    server.attack("/v1/responses", {"input": [message] * 40_000, "max_output_tokens": 1})
    server.attack("/v1/chat/completions", {"messages": [message] * 40_000, "max_tokens": 1})


def many_entries(server: Server) -> None:
    """A large map or list in each field that takes one."""
    ids, texts, names = list(range(1_000_000)), ["ab"] * 1_000_000, {f"x{i}": 1 for i in range(400_000)}
    pairs, objects = [[1, 2]] * 1_000_000, [{"type": "text"}] * 400_000
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": names}}}
    large: dict[str, object] = {
        "logit_bias": {str(i): 1 for i in range(600_000)}, "stop": texts, "bad_words": texts,
        "dry_sequence_breakers": texts, "stop_token_ids": ids, "allowed_token_ids": ids, "dry_breaker_token_ids": ids,
        "bad_words_token_ids": pairs, "metadata": names, "extra_args": names,
        "structured_outputs": {"choice": texts},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": texts}}},
    }  # fmt: skip
    of_chats = {
        "tools": [tool], "chat_template_kwargs": {"x": texts}, "messages": [{"role": "user", "content": objects}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": objects}},
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies = [("/v1/completions", {"prompt": "a", "max_tokens": 1, name: value}) for name, value in large.items()]
    bodies += [("/v1/chat/completions", {**chat, name: value}) for name, value in (large | of_chats).items()]
    bodies += [("/v1/completions", {"prompt": "a", **names}), ("/detokenize", {"tokens": ids})]
    for path, body in [*bodies, ("/detokenize", {"tokens": texts})]:
        server.attack(path, msgspec.json.encode(body))  # so fast that the neighbour in this process goes on


def many_inputs(server: Server) -> None:
    for inputs in (["b"] * 200_000, [[1]] * 200_000, [[1]] * 60_000):
        server.attack("/v1/embeddings", {"input": inputs})
    server.attack("/rerank", {"query": "a", "documents": [{"text": "b"}] * 200_000})
    server.attack("/rerank", {"query": "a", "documents": ["b"] * 200_000})


def scores_with_many(server: Server) -> None:
    for count in (2000, 200_000):
        server.attack("/score", {"text_1": "a" * 4000, "text_2": ["b"] * count})


def many_prompts(server: Server) -> None:
    server.attack("/v1/completions", {"prompt": [[97 + i % 20] for i in range(20000)], "max_tokens": 4})


def many_completions(server: Server) -> None:
    server.attack("/v1/completions", {"prompt": "a", "n": 16384, "max_tokens": 4000, "ignore_eos": True}, timeout=10.0)


def many_stops(server: Server) -> None:
    stops = [f"zzq{i}" for i in range(600_000)]
    server.attack("/v1/completions", {"prompt": "a", "max_tokens": 50, "stop": stops})


def a_long_field(server: Server) -> None:
    server.attack("/v1/completions", {"prompt": "a", "x" * 4_000_000: 1})
    server.attack("/v1/chat/completions", {"messages": [], "y" * 4_000_000: 1})


def heavy_grammars(server: Server) -> None:
    def grammar(i: int) -> None:
        heavy = {"json": {"type": "integer", "multipleOf": 200003 + 2 * i}}
        server.attack("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": heavy})

    together(8, grammar)


def grammars_without_end(server: Server) -> None:
    def grammar(i: int) -> None:
        regex = {"regex": f"((a{{1,100}}){{1,100}}){{1,{100 + i}}}"}
        server.attack("/v1/completions", {"prompt": "a", "max_tokens": 200, "structured_outputs": regex})

    together(4, grammar)


def invalid_bytes(server: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/abort"):
        for content in (
            b'{"prompt":"\xff"}',
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'"\\ud800"',
            b"1e999",
            b"",
        ):
            server.attack(path, content)


def template_arguments(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}]
    for name in ("media", "messages", "self", "tools", "add_generation_prompt", "chat_template"):
        for value in ([1], "a", {}, True):
            body = {"messages": messages, "chat_template_kwargs": {name: value}, "max_tokens": 1}
            server.attack("/v1/chat/completions", body)
            server.attack("/tokenize", {"messages": messages, "chat_template_kwargs": {name: value}})


VALUES = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    1e308,
    "",
    "a",
    "\u0000",
    "𝕏" * 50,
    [],
    [[]],
    {},
    {"a": [1]},
    [None],
    "NaN",
)
BODIES: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "n": 1, "logprobs": 1, "stop": ["b"], "seed": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "stream_options": None,
    },
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "store": False},
    "/v1/messages": {
        "model": "talker",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2,
        "system": "b",
        "stop_sequences": [],
    },
    "/tokenize": {"prompt": "a", "add_special_tokens": True},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a", "encoding_format": "float"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "none"},
    "/abort": {"request_id": "none"},
    "/reset_prefix_cache": {},
}


def mutated(value: object, dice: random.Random) -> object:
    """Return the value with one part replaced, removed or added."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        if dice.random() < 0.1:
            return {**value, dice.choice(("x", "", name + "s", "media")): dice.choice(VALUES)}
        if dice.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: mutated(value[name], dice)}
    if isinstance(value, list) and value and dice.random() < 0.7:
        at = dice.randrange(len(value))
        return [*value[:at], mutated(value[at], dice), *value[at + 1 :]]
    return dice.choice(VALUES)


def mutation(dice: random.Random) -> tuple[str, object]:
    """Return a path, and a body of it that is damaged in up to three places."""
    path = dice.choice(list(BODIES))
    body: object = dict(BODIES[path])
    for _ in range(dice.choice((1, 1, 2, 3))):
        body = mutated(body, dice)
    return path, body


def mutated_bodies(server: Server, count: int = 3000) -> None:
    dice = random.Random(5)
    for _ in range(count):
        server.attack(*mutation(dice))


ATTACKS = (
    endless_head, head_behind_a_stream, endless_trailer, pipelined_requests, slow_heads, bodies_of_digits, all_logprobs,
    logprobs_nobody_reads, whole_answers_with_logprobs, bodies_in_chunks_of_one_byte, messages_of_many_pieces,
    many_pieces_that_are_taken, many_entries, many_inputs, scores_with_many, many_prompts, many_completions, many_stops,
    a_long_field, heavy_grammars, grammars_without_end, invalid_bytes, template_arguments, mutated_bodies,
)  # fmt: skip


# -- the neighbour -----------------------------------------------------------------------------------------------------


class Neighbour:
    """What another client sees meanwhile. waits: of /health, in seconds. gaps: between the pieces of its stream.
    statuses: of short completions and of the stream.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self.waits: list[float] = []
        self.gaps: list[float] = []
        self.statuses: Counter[object] = Counter()
        works = self._ask_health, self._complete, self._read_streams
        self._threads = [threading.Thread(target=work) for work in works]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _ask_health(self) -> None:
        while not self._stop.wait(0.02):
            before = time.monotonic()
            with suppress(OSError):
                self._server.ask("GET", "/health")
            self.waits.append(time.monotonic() - before)

    def _complete(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self.statuses[self._server.ask("POST", "/v1/completions", {"prompt": "b", "max_tokens": 2})] += 1
            except (OSError, http.client.HTTPException) as error:
                self.statuses[type(error).__name__] += 1

    def _read_streams(self) -> None:
        while not self._stop.is_set():
            try:
                self._read_stream()
            except (OSError, http.client.HTTPException) as error:
                self.statuses[type(error).__name__] += 1

    def _read_stream(self) -> None:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=PATIENCE)
        with closing(connection):
            connection.request("POST", "/v1/completions", STREAM, JSON)
            response = connection.getresponse()
            self.statuses[response.status] += 1
            before = time.monotonic()
            while response.read1() and not self._stop.is_set():
                now = time.monotonic()
                self.gaps.append(now - before)
                before = now


def run(server: Server, attack: Callable[[Server], None]) -> list[str]:
    """Run one attack, print its row, and return what is wrong."""
    before, server.statuses, neighbour = server.memory(), Counter(), Neighbour(server)
    begin = time.monotonic()
    with neighbour.running():
        attack(server)
        time.sleep(0.5)
    waits, gaps = sorted(neighbour.waits), sorted(neighbour.gaps)
    growth, longest = server.memory() - before, waits[-1]
    found = f"{dict(server.statuses)!s:44.44} {dict(neighbour.statuses)!s:24.24}"
    between = f"{gaps[int(0.99 * len(gaps))] * 1e3:7.0f} ms" if gaps else f"{'-':>10}"
    times = f"{waits[int(0.99 * len(waits))] * 1e3:7.0f} {longest * 1e3:7.0f} ms {between}"
    print(f"{attack.__name__:28} {time.monotonic() - begin:5.1f} s  {found} {times} {growth / 1e6:7.0f} MB", flush=True)
    wrong = {
        "the server ended": server.process.poll() is not None,
        "500": bool(server.statuses[500]),
        f"the neighbour got {dict(neighbour.statuses)}": bool(neighbour.statuses.keys() - {200}),
        f"memory grew by {growth >> 20} MiB": growth > server.most_growth,
        f"/health waited {longest:.1f} s": longest > LONGEST_WAIT,
    }
    return [f"{attack.__name__}: {reason}" for reason, holds in wrong.items() if holds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; without, all of them")
    parser.add_argument("--replicas", action="store_true", help="two replicas behind a front end")
    given = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not given.names or attack.__name__ in given.names]
    with tempfile.TemporaryDirectory() as folder:
        model = with_template(write_talking_model(Path(folder) / "talker"), Path(folder) / "caller", CALLER)
        server = Server(model, 2 if given.replicas else 1)
        try:
            print(
                f"{'attack':28} {'':7}  {'answers':44} {'neighbour':24} {'p99':>7} {'longest':>10} {'stream p99':>10}"
                f" {'memory':>10}"
            )
            wrong = [reason for attack in chosen for reason in run(server, attack)]
        finally:
            server.process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            status = server.process.wait(PATIENCE)
    seconds = time.monotonic() - begin
    print(f"{len(chosen)} attacks, {len(wrong)} complaints; the server ended with {status} in {seconds:.1f} s")
    for reason in [*wrong, *(line for line in server.log if "Traceback" in line)]:
        print(f"  {reason.strip()}")
    sys.exit(bool(wrong) or status != 0)


if __name__ == "__main__":
    main()
