"""Many clients at once, most of which behave badly: nothing is left, and the others get what they would get alone."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from server_rig import HI, frames_of, serving

NUM_STREAMS = 240


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, keep_alive=0.2, engine={"max_num_seqs": 32}) as running:
        yield running


def request_of(body: dict, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def opened(server):
    """A connection, of which only a few kilobytes are received before they are read."""
    place = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((place.hostname, place.port))
    return await asyncio.open_connection(sock=client, limit=4096)


def body(i: int) -> dict:
    return {"prompt": f"prompt {i % 7}", "max_tokens": 3 + i % 9, "seed": i % 7, "stream": True, "ignore_eos": True}


async def text_of(client: httpx.AsyncClient, i: int) -> str:
    response = await client.post("/v1/completions", json=body(i))
    assert response.status_code == 200, response.text
    return "".join(frame["choices"][0]["text"] for frame in frames_of(response.text))


def client_of(server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits, trust_env=False)


def test_many_streams_at_once_give_what_each_gives_alone(server):
    async def crowd() -> None:
        async with client_of(server) as client:
            alone = [await text_of(client, i) for i in range(63)]
            texts = await asyncio.gather(*(text_of(client, i) for i in range(NUM_STREAMS)))
            assert texts == [alone[i % 63] for i in range(NUM_STREAMS)]

    asyncio.run(crowd())
    server.check_nothing_is_left()


@pytest.mark.parametrize("seed", range(2))
def test_connections_that_close_at_any_moment_leave_nothing_and_change_no_other_answer(server, seed):
    dice = random.Random(seed)

    async def leave(i: int, moment: float) -> None:
        _, writer = await opened(server)
        whole = request_of({**body(i), "max_tokens": 400, "n": 1 + i % 2, "stream": i % 3 > 0})
        writer.write(whole[: len(whole) if i % 5 else dice.randrange(len(whole))])
        await asyncio.sleep(moment)
        if i % 2:
            writer.transport.abort()  # a reset in place of an orderly end
        else:
            writer.close()

    async def storm() -> None:
        async with client_of(server) as client:
            alone = await text_of(client, 5)
            bad = [leave(i, dice.random()) for i in range(120)]
            good = [text_of(client, 5) for _ in range(20)]
            assert set((await asyncio.gather(*bad, *good))[120:]) == {alone}

    asyncio.run(storm())
    server.check_nothing_is_left()


def test_clients_that_do_not_read_cost_the_memory_of_one_state_and_delay_no_other(talker):
    """A stream's frames are far larger than what the sockets hold."""
    num_tokens = 600

    async def storm(server) -> None:
        idle = []
        for i in range(8):
            reader, writer = await opened(server)
            writer.write(request_of({**body(i), "max_tokens": num_tokens, "logprobs": 5}))
            idle.append((reader, writer))
        async with client_of(server) as client:
            await text_of(client, 1)
            while server.llm.num_unfinished:
                await asyncio.sleep(0.01)
            await text_of(client, 1)
        for reader, writer in idle:
            received = b""
            while b"[DONE]" not in received:
                part = await reader.read(1 << 20)
                assert part
                received += part
            writer.close()
            frames = [json.loads(frame[6:]) for frame in received.split(b"\n") if frame.startswith(b"data: {")]
            assert sum(len(frame["choices"][0]["logprobs"]["tokens"]) for frame in frames) == num_tokens
            assert len(frames) < num_tokens / 2  # what came while nothing was read is one state

    with serving(talker, send_buffer=4096, drain_timeout=1.0) as server:
        asyncio.run(storm(server))
        server.check_nothing_is_left()


def test_memory_stays_flat_over_many_requests(server):
    async def rounds(count: int) -> None:
        async with client_of(server) as client:
            for _ in range(count):
                await asyncio.gather(*(text_of(client, i) for i in range(40)))

    asyncio.run(rounds(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(rounds(10))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
    server.check_nothing_is_left()


def test_chats_of_many_clients_are_not_mixed(server):
    async def crowd() -> None:
        async with client_of(server) as client:

            async def chat(i: int) -> str:
                messages = [*HI, {"role": "user", "content": str(i % 4)}]
                wanted = {"messages": messages, "max_tokens": 10, "seed": i % 4, "stream": i % 2 > 0}
                response = await client.post("/v1/chat/completions", json=wanted)
                if not i % 2:
                    return response.json()["choices"][0]["message"]["content"]
                deltas = [frame["choices"][0]["delta"] for frame in frames_of(response.text)]
                return "".join(delta.get("content", "") for delta in deltas)

            alone = [await chat(i) for i in range(4)]
            assert await asyncio.gather(*(chat(i) for i in range(80))) == alone * 20

    asyncio.run(crowd())
    server.check_nothing_is_left()
