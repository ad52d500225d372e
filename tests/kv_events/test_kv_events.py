"""Cache events on the wire: as vLLM's structs are encoded, in order, and complete for a reader that was late."""

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from engine_rig import make_engine, run

from foreword.batch import KVGroup, SamplingParams
from foreword.cache import BlockRemoved, BlockStored, CacheCleared
from foreword.cache.prefix import ROOT_HASH
from foreword.errors import ConfigError
from foreword.kv_events.log import CacheLog
from foreword.kv_events.publisher import KVEventPublisher
from foreword.kv_events.wire import EventEncoder

FULL = [KVGroup(2)]


def declared(as_arrays: bool):
    """The structs of vLLM's kv_events, as published: its batches, stored and removed blocks, and clearings."""

    class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[Any]
        data_parallel_rank: int | None = None

    class KVCacheEvent(msgspec.Struct, array_like=as_arrays, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(KVCacheEvent, array_like=as_arrays):
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None

    class BlockRemoved(KVCacheEvent, array_like=as_arrays):
        block_hashes: list[int]
        medium: str | None
        group_idx: int | None = None

    class AllBlocksCleared(KVCacheEvent, array_like=as_arrays):
        pass

    return EventBatch, BlockStored, BlockRemoved, AllBlocksCleared


def name(last: int) -> bytes:
    """A hash whose last 64 bits are this number."""
    return b"\1" * 8 + last.to_bytes(8, "big")


def stored(hash: int, parent: int | None, tokens: tuple[int, ...], block=1, group=0, extra=()) -> BlockStored:
    return BlockStored(name(hash), ROOT_HASH if parent is None else name(parent), tokens, block, group, extra)


BIG = 2**64 - 2


@pytest.mark.smoke
@pytest.mark.parametrize("format", ["map", "array"])
def test_a_batch_is_byte_equal_to_the_structs_of_vllm(format):
    batch, block_stored, block_removed, cleared = declared(format == "array")
    groups = [KVGroup(2), KVGroup(2, sliding_window=5), KVGroup(2, recurrent=True)]
    events = [
        stored(BIG, None, (1, 2)),
        stored(7, BIG, (3, 400_000), block=2),
        stored(8, 7, (5, 6), group=1),
        stored(9, 7, (5, 6), group=2),
        stored(10, None, (1, 2), extra=(("salt", "x"), ("image", "abc", 3))),
        replace(stored(11, None, (1, 2), extra=(("adapter", 3, "law"), ("salt", "x"))), adapter=(3, "law")),
        replace(stored(12, 11, (3, 4)), adapter=(3, "law")),
        BlockRemoved(name(7), 2, 0),
        BlockRemoved(name(BIG), 1, 0),
        CacheCleared(),
    ]
    common = {"block_size": 2, "lora_id": None, "medium": "CPU", "lora_name": None}
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    expected = [
        block_stored(block_hashes=[BIG, 7], parent_block_hash=None, token_ids=[1, 2, 3, 400_000], **common, **full),
        block_stored(block_hashes=[8], parent_block_hash=7, token_ids=[5, 6], **common, **window),
        block_stored(
            block_hashes=[9], parent_block_hash=7, token_ids=[5, 6], **common, group_idx=2, kv_cache_spec_kind="mamba"
        ),
        block_stored(
            block_hashes=[10],
            parent_block_hash=None,
            token_ids=[1, 2],
            **common,
            extra_keys=[("x", ("abc", 3))],
            **full,
        ),
        block_stored(
            block_hashes=[11, 12],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            **common | {"lora_id": 3, "lora_name": "law"},
            extra_keys=[("law", "x"), ("law",)],
            **full,
        ),
        block_removed(block_hashes=[7, BIG], medium="CPU", group_idx=0),
        cleared(),
    ]
    found = EventEncoder(groups, format).encode(events, 12.5)
    assert found == msgspec.msgpack.encode(batch(ts=12.5, events=expected, data_parallel_rank=0))


def test_content_in_several_blocks_is_told_once():
    encoder = EventEncoder(FULL)
    first, spare = stored(1, None, (1, 2), block=1), stored(1, None, (1, 2), block=2)
    assert encoder.encode([first, spare], 0.0) == EventEncoder(FULL).encode([first], 0.0)
    assert encoder.encode([BlockRemoved(name(1), 1, 0)], 0.0) is None
    assert encoder.encode([BlockRemoved(name(1), 2, 0)], 0.0) is not None
    assert encoder.encode([first], 0.0) == EventEncoder(FULL).encode([first], 0.0)


def test_partial_blocks_are_not_told():
    encoder = EventEncoder(FULL)
    assert encoder.encode([stored(1, None, (1,)), BlockRemoved(name(1), 1, 0)], 0.0) is None


def test_groups_of_other_block_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"\[2, 4\]"):
        EventEncoder([KVGroup(2), KVGroup(4)])


def test_an_endpoint_that_cannot_be_used_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        KVEventPublisher(CacheLog(), FULL, endpoint="nonsense://*")


@pytest.fixture
def connect():
    """Makes a socket of a kind that is connected to an endpoint."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def make(kind, endpoint):
            socket = stack.enter_context(context.socket(kind))
            socket.connect(endpoint)
            return socket

        yield make


class Mirror:
    """The cache as a reader of its events knows it: hash → (parent, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}

    def read(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            if event["type"] == "BlockStored":
                parent, size = event["parent_block_hash"], event["block_size"]
                for i, hash in enumerate(event["block_hashes"]):
                    assert hash not in self.blocks
                    assert parent is None or parent in self.blocks
                    self.blocks[hash] = parent, event["token_ids"][i * size : (i + 1) * size]
                    parent = hash
            elif event["type"] == "BlockRemoved":
                for hash in event["block_hashes"]:
                    del self.blocks[hash]
            else:
                self.blocks.clear()

    def prefixes(self) -> set[tuple[int, ...]]:
        def tokens(hash: int | None) -> list[int]:
            if hash is None:
                return []
            parent, own = self.blocks[hash]
            return tokens(parent) + own

        return {tuple(tokens(hash)) for hash in self.blocks}


def cached_prefixes(engine, candidates) -> set[tuple[int, ...]]:
    """Return the prefixes of whole blocks of some token sequences that a lookup finds."""
    size, found = engine.cache.tree.block_size, set()
    for ids in candidates:
        hit = engine.cache.lookup(np.array([*ids, 0], np.int32)).num_full
        found |= {tuple(ids[:n]) for n in range(size, hit + 1, size)}
    return found


def test_a_reader_mirrors_the_cache_and_replay_gives_the_same(connect):
    log = CacheLog()
    engine = make_engine(observers=[log])
    groups = [table.group for table in engine.states.block_tables]
    places = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv@pod@model"}
    with KVEventPublisher(log, groups, **places) as publisher:
        source = publisher.source
        assert (source.topic, source.block_size) == ("kv@pod@model", engine.cache.tree.block_size)
        subscriber = connect(zmq.SUB, source.endpoint)
        subscriber.subscribe(b"kv@")
        sequences = []

        def compute(prompt) -> None:
            number = len(sequences)
            engine.add_request(str(number), prompt, SamplingParams(seed=number, max_tokens=3))
            output = run(engine)[str(number)]
            sequences.append(output.prompt_token_ids + output.outputs[0].token_ids)

        for i in count():  # until the subscription has arrived
            compute([1 + (i * j) % 7 for j in range(8)])
            if subscriber.poll(50):
                break
        for i in range(12):
            compute([1 + (i + j * (i % 3 + 1)) % 9 for j in range(9 + i)])
        expected = cached_prefixes(engine, sequences)
        assert len(expected) > 10

        reader = connect(zmq.DEALER, source.replay_endpoint)
        reader.send_multipart([b"", b"no number"])  # ignored
        until, replayed = time.monotonic() + 60, None
        while replayed is None or replayed.prefixes() != expected:  # until all events are sent
            assert time.monotonic() < until
            replayed, payloads = Mirror(), []
            numbers = replay(reader, 0, payloads.append)
            for payload in payloads:
                replayed.read(payload)
        assert numbers[-1] >= 1

        subscribed, number = Mirror(), -1
        while number < numbers[-1]:
            assert subscriber.poll(60_000)
            topic, sent, payload = subscriber.recv_multipart()
            if number < 0:  # what came before the subscription
                for earlier in payloads[: int.from_bytes(sent, "big")]:
                    subscribed.read(earlier)
            number = int.from_bytes(sent, "big")
            assert topic == b"kv@pod@model"
            assert payload == payloads[number]
            subscribed.read(payload)
        assert subscribed.prefixes() == expected
        assert replay(reader, 1, lambda payload: None)[0] == 1
    engine.close()


def replay(reader, start: int, read) -> list[int]:
    """The numbers of the batches from ``start`` on."""
    numbers = []
    reader.send_multipart([b"", start.to_bytes(8, "big")])
    while True:
        assert reader.poll(60_000)
        _, number, payload = reader.recv_multipart()
        if number == b"\xff" * 8:
            assert payload == b""
            assert numbers == list(range(start, start + len(numbers)))
            return numbers
        numbers.append(int.from_bytes(number, "big"))
        read(payload)
