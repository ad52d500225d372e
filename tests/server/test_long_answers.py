"""Long answers are made in pieces, as their clients read them, and streams leave the event loop to others."""

import asyncio
import gc
import json
import socket
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_rig import Serving, serving

from foreword.server.listener import MOST_SMALL, short_collections
from foreword.server.pace import MOST_VALUES, NUM_TURNS, Beginnings, Pace
from foreword.server.pieces import PIECE, json_pieces
from foreword.server.reply import PiecesReply

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def with_iterators(value):
    """The value with an iterator in place of each list."""
    if isinstance(value, dict):
        return {name: with_iterators(item) for name, item in value.items()}
    return map(with_iterators, value) if isinstance(value, list) else value


@pytest.mark.long
@given(st.dictionaries(st.text(), VALUES))
def test_pieces_are_the_json_of_the_body(body):
    assert json.loads(b"".join(json_pieces(body))) == body
    assert json.loads(b"".join(json_pieces(with_iterators(body)))) == body


def test_an_item_is_made_when_its_piece_is_written():
    made = []
    items = (made.append(i) or "a" * 1000 for i in range(1000))
    pieces = json_pieces({"items": items, "end": 1})
    first = next(pieces)
    assert PIECE <= len(first) < PIECE + 2000
    assert len(made) < 70
    assert json.loads(first + b"".join(pieces)) == {"items": ["a" * 1000] * 1000, "end": 1}


def test_a_client_that_does_not_read_stops_the_making_of_its_answer():
    made = []
    reply = PiecesReply({"items": (made.append(i) or "a" * 1000 for i in range(1000))})
    assert "content-length" not in reply.headers

    async def run():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        task = asyncio.create_task(reply({}, None, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert len(made) < 200


def test_a_short_answer_has_its_length():
    assert PiecesReply({"items": iter([1, 2])}).headers["content-length"] == str(len(b'{"items":[1,2]}'))


def test_a_turn_of_the_event_loop_makes_the_frames_of_a_few_streams_in_their_order():
    order = []

    async def run():
        pace, turns = Pace(), 0

        async def stream(i):
            for piece in range(3):
                await pace.take(MOST_VALUES // 2)
                order.append((turns, piece, i))

        streams = [asyncio.create_task(stream(i)) for i in range(10)]
        streams[3].cancel()
        while not all(task.done() for task in streams):
            await asyncio.sleep(0)
            turns += 1
        await pace.take(1)

    asyncio.run(run())
    by_turn = [sum(turn == one for one, *_ in order) for turn in range(order[-1][0] + 1)]
    assert max(by_turn) <= 3  # a part of a turn's budget may be left to one that takes more
    assert [i for _, piece, i in order if piece == 0] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(order) == 27


def test_requests_begin_in_their_order_with_turns_of_the_event_loop_between_them():
    began = []

    async def run():
        beginnings, turns = Beginnings(), 0

        async def request(i):
            await beginnings.take()
            began.append((turns, i))

        tasks = [asyncio.create_task(request(i)) for i in range(8)]
        await asyncio.sleep(0)
        for i in (2, 3, 7):  # their clients leave before they begin
            tasks[i].cancel()
        while not all(task.done() for task in tasks):
            turns += 1
            await asyncio.sleep(0)
        for _ in range(NUM_TURNS):  # with no request, the next one begins at once
            await asyncio.sleep(0)
        turns = 1000
        await request(8)

    asyncio.run(run())
    assert [i for _, i in began] == [0, 1, 4, 5, 6, 8]
    turns = [turn for turn, _ in began]
    assert [after - before >= NUM_TURNS - 1 for before, after in pairwise(turns)] == [True] * 5
    assert turns[0] == 0
    assert turns[-1] == 1000


def test_the_collector_is_as_before_after_the_server():
    before = gc.get_threshold(), gc.get_freeze_count()
    with short_collections():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[2] == 10 * before[0][2]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def request(path: str, **body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def unread(running: Serving, content: bytes) -> socket.socket:
    """A connection that has sent a request, and reads nothing of its answer."""
    _, port = running.url.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(port)))
    connection.sendall(content)
    return connection


@pytest.mark.long
def test_a_connection_whose_client_reads_nothing_is_cut(talker):
    asked = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "logprobs": 20}
    with serving(talker, engine={"max_model_len": 512}, send_buffer=4096, send_timeout=0.3) as running:
        for stream in (False, True):
            with unread(running, request("/v1/completions", **asked, stream=stream)):
                running.wait_until(lambda: running.context.admission.num_requests > 0)
                begin = time.monotonic()
                running.wait_until(lambda: not running.context.progress)
                running.check_nothing_is_left()
                assert time.monotonic() - begin < 45  # the default is 60 s


@pytest.mark.long
def test_long_answers_have_the_values_of_short_ones(talker):
    asked = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "temperature": 0, "logprobs": 20, "echo": True}
    with serving(talker, engine={"max_model_len": 512, "kv_cache_bytes": 8 << 20}) as running:
        response = running.post("/v1/completions", asked)
        assert response.headers["transfer-encoding"] == "chunked"
        (choice,) = response.json()["choices"]
        frames = running.frames("/v1/completions", asked)
    for name, values in choice["logprobs"].items():
        assert [
            v for frame in frames if frame["choices"][0]["logprobs"] for v in frame["choices"][0]["logprobs"][name]
        ] == values
    assert len(choice["logprobs"]["tokens"]) == 253
    assert all(len(found) <= 21 for found in choice["logprobs"]["top_logprobs"][1:])


def test_a_body_in_many_small_chunks_is_refused_and_in_few_read_as_a_whole(talker):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"

    def status(running, content: bytes) -> bytes:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(head + chunks + b"0\r\n\r\n")
            return connection.recv(12)

    with serving(talker) as running:
        content = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
        assert status(running, content) == b"HTTP/1.1 200"
        assert status(running, content + b" " * MOST_SMALL) == b"HTTP/1.1 400"


def test_scores_of_a_long_text_with_many_take_no_more_memory_than_answers_may(talker):
    texts = {"text_1": "a" * 2000, "text_2": ["b"] * 10_000}
    with serving(talker, max_answer_bytes=128 << 20, max_prompts=20_000) as running:
        refused = running.post("/score", texts).json()["error"]
        assert refused["code"] == "answer_too_large"
        assert running.post("/score", texts | {"text_2": ["b"] * 100}).status_code == 200
        running.check_nothing_is_left()
        assert running.context.admission.num_answer_bytes == 0
