"""Clients that behave well or badly, and what a well-behaved one gets."""

import asyncio
import json
import random
import socket
from urllib.parse import urlsplit

import httpx
from server_rig import frames_of


def request_of(body: dict, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection, of which only a few kilobytes are received before they are read."""
    place = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (place.hostname, place.port))
    return await asyncio.open_connection(sock=client, limit=4096)


def body(i: int) -> dict:
    return {"prompt": f"prompt {i % 7}", "max_tokens": 3 + i % 9, "seed": i % 7, "stream": True, "ignore_eos": True}


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=240, limits=limits, trust_env=False)


async def text_of(client: httpx.AsyncClient, i: int) -> str:
    response = await client.post("/v1/completions", json=body(i))
    assert response.status_code == 200, response.text
    return "".join(frame["choices"][0]["text"] for frame in frames_of(response.text))


async def leave(url: str, i: int, dice: random.Random) -> None:
    """Ask for a long answer, perhaps with half a request, and close the connection at some moment."""
    _, writer = await opened(url)
    whole = request_of({**body(i), "max_tokens": 400, "n": 1 + i % 2, "stream": i % 3 > 0})
    writer.write(whole[: len(whole) if i % 5 else dice.randrange(len(whole))])
    await asyncio.sleep(dice.random())
    if i % 2:
        writer.transport.abort()  # a reset in place of an orderly end
    else:
        writer.close()


async def read_slowly(url: str, i: int, dice: random.Random) -> None:
    """A stream with frames far larger than what the sockets hold, which is not read for a while."""
    reader, writer = await opened(url)
    writer.write(request_of({**body(i), "max_tokens": 300, "logprobs": 5}))
    await asyncio.sleep(1 + dice.random())
    received = b""
    while b"[DONE]" not in received:
        part = await reader.read(1 << 20)
        assert part
        received = received[-16:] + part
    writer.close()


async def stay_silent(url: str, seconds: float) -> None:
    """A connection on which nothing is sent."""
    _, writer = await opened(url)
    await asyncio.sleep(seconds)
    writer.close()
