"""Attacks on a running server: what each costs its neighbours, in memory and in time, and how it is answered.

    PYTHONPATH=src:tests:tests/cli python tests/server/attack.py [NAME …] [--replicas] [--bound MILLISECONDS]

`foreword serve` runs in a process of its own, or as a front end with two replicas. While an attack runs, again and
again for `LEAST_SECONDS`, a neighbour in another process asks GET /health, completes short prompts and reads a stream.
A row of the table has the statuses that the attack got, the neighbour's statuses, the 99th percentile and the longest
of its waits for /health and of the times between two pieces of its stream, and the growth of the processes' memory.

The program ends with 1 if a server ends, answers 500, refuses the neighbour, grows by more than `MOST_GROWTH`, or lets
one of the 99th percentiles exceed the bound. By default that is what two cores keep which other programs use as well;
100 holds on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from processes import start
from server_rig import with_template
from talking_model import TEMPLATE, write_talking_model

from foreword.server.operations import OPERATIONS

MOST_GROWTH = (
    700 << 20
)  # bytes per process that serves: grammar_cache_bytes, and what two grammars take while they are tried
BOUND = 1000.0  # milliseconds
LEAST_SECONDS = 2.0
PATIENCE = 60.0
MODEL = ("--max-model-len", 4096, "--kv-cache-bytes", 64 << 20, "--num-threads", 1, "--drain-timeout", 2,
         "--served-model-name", "talker")  # fmt: skip
CALLER = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TEMPLATE
JSON = {"Content-Type": "application/json"}


class Address:
    """A server. statuses: what it answered to the attack."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.statuses: Counter[object] = Counter()

    def ask(self, method: str, path: str, body: object = None, *, timeout: float = PATIENCE, **headers: str) -> int:
        """Return the status of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
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


class Server(Address):
    """`foreword serve` in processes of its own."""

    def __init__(self, model: Path, replicas: int) -> None:
        self.most_growth = replicas * MOST_GROWTH
        many = ("--replicas", replicas) if replicas > 1 else ()
        self.process = start("serve", model, "--port", 0, *MODEL, *many)
        line = self.process.stderr.readline().decode()
        assert " at http://" in line, line + self.process.stderr.read().decode()
        host, _, port = line.split(" at http://")[1].split(",")[0].strip().rpartition(":")
        super().__init__(host, int(port))
        self.log: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.log.extend(line.decode(errors="replace") for line in self.process.stderr)

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
        server.attack(path, body)


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


def hard_numbers(server: Server) -> None:
    """Floats that are read slowly, integers whose time grows with the square of their digits, and those in a text."""
    floats, integers = b",".join([b"1.7976931348623157e308"] * 350_000), b",".join([b"9" * 4000] * 2000)
    for values in (floats, integers):
        server.attack("/v1/completions", b'{"prompt":"a","logit_bias":{"1":[' + values + b"]}}")
        call = {"function": {"name": "f", "arguments": '{"a":[' + values[:7_000_000].decode() + "1]}"}}
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        server.attack("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def large_bodies_together(server: Server) -> None:
    """Bodies that never end, those of streams in progress, and many that are read at the same time."""
    content = json.dumps(
        {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True, "user": "a" * 7_900_000}
    )
    sized = b"%sContent-Length: %d\r\n\r\n" % (POST, len(content))
    together(40, lambda _: server.send([sized, content[:-1].encode()], 4.0, reads=False))
    together(40, lambda _: server.send([sized, content.encode()], 4.0, reads=False))
    numbers = {"prompt": list(range(1_000_000)), "max_tokens": 1}
    together(16, lambda _: server.attack("/v1/completions", numbers))


def many_tools(server: Server) -> None:
    chat: dict[str, object] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for count, schema in (
        (1000, {"type": "object"}),
        (10_000, {}),
        (1, {"properties": {"x": {"enum": ["ab"] * 200_000}}}),
    ):
        tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]
        for choice in ("auto", "required"):
            server.attack("/v1/chat/completions", {**chat, "tools": tools, "tool_choice": choice})


def ambiguous_grammars(server: Server) -> None:
    """Grammars whose time per token grows with the output."""
    grammar = {"grammar": 'start: s\ns: s s | s s s | "a" | ""\n'}
    body = {"prompt": "a", "max_tokens": 200, "n": 32, "structured_outputs": grammar}
    together(2, lambda _: server.attack("/v1/completions", body))


def patterns(server: Server) -> None:
    """Regular expressions and bounds in schemas."""
    many = "|".join(f"{'a' * (i % 50)}{i}" for i in range(3000))
    texts = ("^(a+)+$", "^((a{1,1000}){1,1000}b)*$", r"^(?=a)\1$", "^.{60000}$", many)
    schemas: list[object] = [{"type": "string", "pattern": text} for text in texts]
    schemas += [{"type": "array", "minItems": 10**6}, {"type": "string", "minLength": 10**9},
                {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(8)]} for i in range(12)]},
                {"$ref": "file:///etc/passwd"}]  # fmt: skip
    for schema in schemas:
        server.attack("/v1/completions", {"prompt": "a", "max_tokens": 8, "structured_outputs": {"json": schema}})


def long_stops(server: Server) -> None:
    stops = [f"zz{i}{'q' * 55}" for i in range(1000)]
    body = {"prompt": "a", "n": 64, "max_tokens": 300, "ignore_eos": True, "stop": stops}
    together(2, lambda _: server.attack("/v1/completions", body))


def odd_forms(server: Server) -> None:
    """Multipart bodies for transcriptions."""
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    for content in (
        b"".join(part % (b"f%d" % i, b"x") for i in range(90_000)), part % (b"a" * 7_000_000, b"x"),
        b"--b\r\n" + b"X: a\r\n" * 900_000, b"--b\r\n" * 1_000_000, part % (b"file", b"\r\n--" * 1_900_000),
    ):  # fmt: skip
        server.attack("/v1/audio/transcriptions", content)
        length = b"Content-Length: %d\r\n\r\n" % len(content)
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        server.send([head + b"Content-Type: multipart/form-data; boundary=b\r\n" + length, content])


def foreign_protocols(server: Server) -> None:
    upgrade = b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    for content in (
        upgrade + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 500,
        POST + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n", POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 7900 + b"\r\n",
    ):  # fmt: skip
        server.send([content], 1.0)


NESTED = {
    "/v1/completions": ('"prompt":%s', '"prompt":"a","max_tokens":1,"structured_outputs":{"json":%s}'),
    "/v1/chat/completions": tuple(
        f'"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,{field}'
        for field in (
            '"chat_template_kwargs":{"x":%s}', '"metadata":%s', '"tool_choice":%s', '"documents":%s', '"x":%s',
            '"tools":[{"type":"function","function":{"name":"f","parameters":%s}}],"tool_choice":"required"',
            '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":%s}}',
            '"response_format":{"type":"structural_tag","format":%s}',
        )
    ),
    "/v1/messages": (
        '"model":"talker","max_tokens":1,"messages":[{"role":"user","content":%s}]',
        '"model":"talker","max_tokens":1,"messages":[{"role":"user","content":"a"},'
        '{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":%s}]}]',
    ),
    "/v1/responses": ('"input":%s', '"input":"a","tools":[{"type":"function","name":"f","parameters":%s}]'),
    "/v1/load_lora_adapter": ('"lora_name":%s,"lora_path":"x"',),
}  # fmt: skip


def nested_values(server: Server) -> None:
    """Values that nest as deeply as JSON is read, or almost, in the fields that take objects."""
    for depth in (100, 480, 950, 990):
        for begin, inner, end in (
            ('{"a":', "1", "}"),
            ('{"items":', "{}", "}"),
            ('{"anyOf":[', "{}", "]}"),
            ("[", "", "]"),
        ):
            for path, forms in NESTED.items():
                for form in forms:
                    server.attack(path, b"{%s}" % (form % (begin * depth + inner + end * depth)).encode())


def hang_up(server: Server, content: bytes, after: float) -> None:
    """Send a body, and reset the connection after some seconds."""
    with suppress(OSError), socket.create_connection((server.host, server.port), timeout=10.0) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (POST, len(content), content))
        time.sleep(after)


def streams_that_are_reset(server: Server) -> None:
    together(30, lambda i: [hang_up(server, STREAM, 0.01 * (i % 5)) for _ in range(15)])


def grammars_nobody_waits_for(server: Server) -> None:
    """Grammars that compile for long, whose clients leave meanwhile; then one that is compiled at once."""

    def body(i: int) -> bytes:
        heavy: dict[str, object] = {"regex": f"((a{{1,90}}){{1,90}}){{1,{9000 + i}}}"}
        heavy = heavy if i % 2 else {"json": {"type": "integer", "multipleOf": 300007 + 2 * i}}
        return json.dumps({"prompt": "a", "max_tokens": 1, "structured_outputs": heavy}).encode()

    together(20, lambda i: [hang_up(server, body(20 * i + j), 0.1 * (j % 4)) for j in range(6)])
    server.attack("/v1/completions", {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": "[ab]{2}"}})


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


FORMS = {one.path: one.body for one in OPERATIONS if one.body is not None and one.body.form is None}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {path: body.schema()["properties"] for path, body in FORMS.items()}
SHORT = {
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "n_predict": 2,
    "options": {"num_predict": 2},
}


def sample(schema: Mapping[str, Any], dice: random.Random) -> object:
    """Return a value that a schema of the server's own description allows, among small ones."""
    if "anyOf" in schema:
        return sample(dice.choice(schema["anyOf"]), dice)
    if "enum" in schema:
        return dice.choice(schema["enum"] or [None])
    least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    match schema.get("type"):
        case "null":
            return None
        case "boolean":
            return dice.random() < 0.5
        case "integer":
            return min(least + dice.choice((0, 1, 2, 5)), schema.get("maximum", 9))
        case "number":
            return min(least + dice.choice((0, 0.1, 0.5, 1, 2)), schema.get("maximum", 9.0))
        case "array":
            return [sample(schema.get("items", {}), dice) for _ in range(dice.choice((0, 1, 1, 3)))]
        case "object":
            return dice.choice(
                ({}, {"1": 1}, {"type": "function"}, {"type": "json_object"}, {"regex": "a+"}, {"include_usage": True})
            )
        case "string":
            return dice.choice(("a", "ab\n", "", "auto", "1s"))
    return dice.choice(VALUES)


def sampled_bodies(server: Server, count: int = 1500) -> None:
    """Bodies of every operation with up to four more of its fields, of which most have values that are allowed."""
    dice = random.Random(7)
    for _ in range(count):
        server.attack(*sampled_body(dice))


def sampled_body(dice: random.Random) -> tuple[str, object]:
    """Return a path, and a body of it."""
    path = dice.choice(list(FORMS))
    body, schemas = dict(FORMS[path].example), SCHEMAS[path]
    body |= {name: short for name, short in SHORT.items() if name in body}
    for name in dice.sample(sorted(schemas), min(len(schemas), dice.choice((0, 1, 2, 4)))):
        if name not in SHORT:
            body[name] = sample(schemas[name], dice) if dice.random() < 0.9 else dice.choice(VALUES)
    return path.replace("{id}", "a"), mutated(body, dice) if dice.random() < 0.1 else body


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$", "description": "where"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
        "unit": {"enum": ["c", "f", None], "default": "c"},
        "more": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"a": {"type": "object", "properties": {"b": {"const": 1}}}},
}
FUNCTION = {"name": "f", "description": "weather", "parameters": PARAMETERS, "strict": True}
CALLED = {"name": "f", "arguments": '{"city": "a", "days": [1]}'}
WITH_TOOLS: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": True,
        "max_tokens": 4,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "function_call", "call_id": "1", **CALLED},
            {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "model": "talker",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"city": "a"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]},
        ],
        "tools": [{"name": "f", "description": "weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any"},
        "max_tokens": 4,
    },
}


def mutated_tools(server: Server, count: int = 500) -> None:
    """Bodies with tools, calls and their results, damaged in one place that is often inside a schema."""
    dice = random.Random(6)
    for _ in range(count):
        path = dice.choice(list(WITH_TOOLS))
        body = dict(WITH_TOOLS[path])
        if dice.random() < 0.6:
            body["tools"] = mutated(body["tools"], dice)
            server.attack(path, body)
        else:
            server.attack(path, mutated(body, dice))


ATTACKS = (
    endless_head, head_behind_a_stream, endless_trailer, pipelined_requests, slow_heads, bodies_of_digits, all_logprobs,
    logprobs_nobody_reads, whole_answers_with_logprobs, bodies_in_chunks_of_one_byte, messages_of_many_pieces,
    many_pieces_that_are_taken, many_entries, many_inputs, scores_with_many, many_prompts, many_completions, many_stops,
    a_long_field, hard_numbers, large_bodies_together, many_tools, heavy_grammars, grammars_without_end,
    ambiguous_grammars, patterns, long_stops, odd_forms, foreign_protocols, invalid_bytes, template_arguments,
    nested_values, streams_that_are_reset, grammars_nobody_waits_for, mutated_bodies, sampled_bodies, mutated_tools,
)  # fmt: skip


# -- the neighbour -----------------------------------------------------------------------------------------------------


class Neighbour:
    """The answers that another client gets meanwhile. waits: those of /health, in seconds. gaps: between the pieces of
    its stream. statuses: those of short completions and of the stream.
    """

    def __init__(self, server: Address) -> None:
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
        while not self._stop.wait(0.01):
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


def observe(host: str, port: int) -> None:
    """Be a neighbour in this process until standard input ends, then print what it saw."""
    neighbour = Neighbour(Address(host, port))
    with neighbour.running():
        while not neighbour.waits or not neighbour.gaps:
            time.sleep(0.01)
        print("begun", flush=True)
        sys.stdin.read()
    statuses = {str(status): count for status, count in neighbour.statuses.items()}
    print(json.dumps([neighbour.waits, neighbour.gaps, statuses]))


@dataclass(frozen=True, slots=True)
class Times:
    """The 99th percentile and the maximum of response times, in milliseconds."""

    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        ordered = sorted(seconds) or [0.0]
        return cls(ordered[int(0.99 * len(ordered))] * 1e3, ordered[-1] * 1e3)

    def __str__(self) -> str:
        return f"{self.p99:7.0f} {self.longest:7.0f}"


class Outcome(NamedTuple):
    """The effects of an attack. health, stream: times of another client. growth: bytes. complaints: texts."""

    health: Times
    stream: Times
    growth: int
    complaints: list[str]


def run(server: Server, attack: Callable[[Server], None], bound: float) -> Outcome:
    """Run one attack, and print its row."""
    before, server.statuses = server.memory(), Counter()
    command = [sys.executable, __file__, "--neighbour", server.host, str(server.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        begin = until = time.monotonic()
        while until - begin < LEAST_SECONDS:
            attack(server)
            until = time.monotonic()
        seen, _ = neighbour.communicate(timeout=2 * PATIENCE)
    waits, gaps, statuses = json.loads(seen)
    health, stream = Times.of(waits), Times.of(gaps)
    growth = server.memory() - before
    found = f"{dict(server.statuses)!s:44.44} {statuses!s:24.24}"
    print(
        f"{attack.__name__:28} {until - begin:5.1f} s  {found} {health} {stream} ms {growth / 1e6:7.0f} MB", flush=True
    )
    wrong = {
        "the server ended": server.process.poll() is not None,
        "500": bool(server.statuses[500]),
        f"the neighbour got {statuses}": bool(statuses.keys() - {"200"}),
        f"memory grew by {growth >> 20} MiB": growth > server.most_growth,
        f"/health waited {health.p99:.0f} ms": health.p99 > bound,
        f"a stream waited {stream.p99:.0f} ms": stream.p99 > bound,
    }
    return Outcome(health, stream, growth, [f"{attack.__name__}: {reason}" for reason, holds in wrong.items() if holds])


def main() -> None:
    if sys.argv[1:2] == ["--neighbour"]:
        return observe(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; without, all of them")
    parser.add_argument("--replicas", action="store_true", help="two replicas behind a front end")
    parser.add_argument("--bound", type=float, default=BOUND, metavar="MILLISECONDS", help=f"by default {BOUND:g}")
    given = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not given.names or attack.__name__ in given.names]
    with tempfile.TemporaryDirectory() as folder:
        model = with_template(write_talking_model(Path(folder) / "talker"), Path(folder) / "caller", CALLER)
        server = Server(model, 2 if given.replicas else 1)
        try:
            names = f"{'attack':28} {'':7}  {'answers':44} {'neighbour':24}"
            print(f"{names} {'health p99, max':>15} {'stream p99, max':>15} {'memory':>13}")
            outcomes = [run(server, attack, given.bound) for attack in chosen]
        finally:
            server.process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            status = server.process.wait(PATIENCE)
    seconds = time.monotonic() - begin
    complaints = [complaint for outcome in outcomes for complaint in outcome.complaints]
    print(f"{len(chosen)} attacks, {len(complaints)} complaints; the server ended with {status} in {seconds:.1f} s")
    for name in ("health", "stream"):
        times: list[Times] = [getattr(outcome, name) for outcome in outcomes]
        p99, longest = max(one.p99 for one in times), max(one.longest for one in times)
        print(f"  {name}: worst p99 {p99:.0f} ms, longest {longest:.0f} ms")
    print(f"  memory: most growth {max(outcome.growth for outcome in outcomes) / 1e6:.0f} MB")
    for reason in [*complaints, *(line for line in server.log if "Traceback" in line)]:
        print(f"  {reason.strip()}")
    sys.exit(bool(complaints) or status != 0)


if __name__ == "__main__":
    main()
