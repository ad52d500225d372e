"""Many clients at once, most of which behave badly: nothing is left, and the others get what they would get alone."""

import asyncio
import json
import random
import resource

import pytest
from server_rig import HI, frames_of, serving
from storm_clients import body, client_of, leave, opened, request_of, text_of

NUM_STREAMS = 240


@pytest.fixture(scope="module")
def server(talker):
    with serving(talker, keep_alive=0.2, engine={"max_num_seqs": 32}) as running:
        yield running


@pytest.mark.long
def test_many_streams_at_once_give_what_each_gives_alone(server):
    async def crowd() -> None:
        async with client_of(server.url) as client:
            alone = [await text_of(client, i) for i in range(63)]
            texts = await asyncio.gather(*(text_of(client, i) for i in range(NUM_STREAMS)))
            assert texts == [alone[i % 63] for i in range(NUM_STREAMS)]

    asyncio.run(crowd())
    server.check_nothing_is_left()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(2))
def test_connections_that_close_at_any_moment_leave_nothing_and_change_no_other_answer(server, seed):
    dice = random.Random(seed)

    async def storm() -> None:
        async with client_of(server.url) as client:
            alone = await text_of(client, 5)
            bad = [leave(server.url, i, dice) for i in range(120)]
            good = [text_of(client, 5) for _ in range(20)]
            assert set((await asyncio.gather(*bad, *good))[120:]) == {alone}

    asyncio.run(storm())
    server.check_nothing_is_left()


@pytest.mark.long
def test_clients_that_do_not_read_cost_the_memory_of_one_state_and_delay_no_other(talker):
    """A stream's frames are far larger than what the sockets hold."""
    num_tokens = 600

    async def storm(server) -> None:
        idle = []
        for i in range(8):
            reader, writer = await opened(server.url)
            writer.write(request_of({**body(i), "max_tokens": num_tokens, "logprobs": 5}))
            idle.append((reader, writer))
        async with client_of(server.url) as client:
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


@pytest.mark.long
def test_memory_stays_flat_over_many_requests(server):
    async def rounds(count: int) -> None:
        async with client_of(server.url) as client:
            for _ in range(count):
                await asyncio.gather(*(text_of(client, i) for i in range(40)))

    asyncio.run(rounds(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asyncio.run(rounds(10))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
    server.check_nothing_is_left()


def test_chats_of_many_clients_are_not_mixed(server):
    async def crowd() -> None:
        async with client_of(server.url) as client:

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
