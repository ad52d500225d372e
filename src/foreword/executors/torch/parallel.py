"""Several ranks: the torch executor as rank 0, and a process for each further rank.

A rank gets each step as its `StepDifference`, prepares the same batch and computes its shard.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from foreword.arrays import F32, F64, I64
from foreword.batch import InputBatch, InputBuffers, RequestStates
from foreword.batch.difference import DifferenceRecorder, StepDifference, apply_difference, states_of
from foreword.errors import ConfigError, EngineError
from foreword.executors.executor import Capability
from foreword.executors.host import HostStep
from foreword.executors.options import TorchOptions
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.options import device_of_rank, usual_threads
from foreword.executors.torch.packets import PacketReader, PacketRing
from foreword.executors.torch.ranks import Ranks
from foreword.executors.torch.shard import Shards
from foreword.executors.torch.tensors import as_floats
from foreword.models.lora import LoraAdapter
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights
from foreword.sampling import Sampled, StepSampling
from foreword.sampling.parts import LOGIT, PartDraws, best_of, can_be_divided, sampled_from

# What a packet asks for. The count of _COMPUTE is that of its logits_indices, of _DRAW that of log-probabilities.
_PREPARE, _COMPUTE, _DRAW, _CALL = range(4)
_HEADER = struct.Struct("<qqq")  # one of these; its count; the capacity of the step's buffers


class ParallelExecutor(TorchExecutor):
    """A `TorchExecutor` whose MLPs, vocabulary and KV pool are divided among processes.

    tensor_parallel_size: parts of the heads; each process has the keys and values of the heads of one part.
    context_parallel_size: parts of the positions; each process has the keys and values of those of one part, where the
    states have KV groups spread over as many ranks. There are as many processes as the product of both.
    The other options are those of `TorchExecutor`; num_threads is per rank, by default an equal part.

    rank_timeout: seconds that a rank waits for the others in one exchange. Then the step is an EngineError, and all
    ranks end.

    The processes end with `close`, or with this object. After a rank has ended, or a step was interrupted, every step
    is an EngineError.

    device: "cpu", or "cuda" for a CUDA device of each rank's own.

    Raise ConfigError for a size that does not divide the heads, for another device, for fewer CUDA devices than ranks,
    and for compile.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        rank_timeout: float = TorchOptions.rank_timeout,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        sizes: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "context_parallel_size": context_parallel_size,
        }
        given = ", ".join(f"{name}={count}" for name, count in sizes.items() if count != 1)
        if min(sizes.values()) < 1 or not given:
            raise ConfigError(f"{given or sizes}: must be at least 1; 1 for both is `TorchExecutor`")
        if options.get("compile"):
            raise ConfigError(f"compile=True: layers that processes divide are not compiled; leave it or {given} out")
        options["rank_timeout"] = rank_timeout
        shards = Shards(0, **sizes, timeout=rank_timeout)
        shards.spec(spec)
        size = shards.all.size
        own = device_of_rank(device, 0, size, torch.cuda.device_count())
        if options.get("num_threads") is None:
            options["num_threads"] = max(1, usual_threads() // size)
        self._ranks = Ranks(size, rank_timeout)
        self._end = weakref.finalize(self, self._ranks.close)
        try:
            self._ranks.send_object((spec, weights, sizes, device, options))
            super().__init__(spec, weights, shards=shards, device=own, **sizes, **options)
            self._ranks.connect(shards, self.device)
        except BaseException:
            self._end()
            raise
        self.capabilities -= {Capability.BLOCK_TRANSFER}  # each rank has a part of a block
        if context_parallel_size > 1:
            self.capabilities |= {Capability.CONTEXT_PARALLEL}
        self._states: weakref.ref[RequestStates] | None = None
        self._recorder: DifferenceRecorder | None = None
        self._draws: PartDraws | None = None
        self._unsent: list[tuple[int, bytes]] = []

    def close(self) -> None:
        """See `Executor.close`."""
        self._end()

    def launch(self, batch: InputBatch, sampling: StepSampling) -> HostStep:
        """See `Executor.launch`. Raise EngineError if a rank has ended."""
        self._ranks.check()
        step = super().launch(batch, sampling)
        try:
            self._record(batch)
        except BaseException:
            self._forget()
            raise
        return step

    def _record(self, batch: InputBatch) -> None:
        if self._recorder is None or self._states is None or self._states() is not batch.states:
            self._forget()
            self._recorder, self._states = DifferenceRecorder(batch.states), weakref.ref(batch.states)
            self._draws = None
        data = self._recorder.take(batch).to_bytes()
        self._unsent.append((batch.buffers.max_num_batched_tokens, data))

    def _forget(self) -> None:
        """Stop following the states: the next step is a snapshot."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """See `HostExecutor.compute`. Raise EngineError if a rank has ended."""
        with self._exchange():
            self._send_steps(_COMPUTE, len(logits_indices), logits_indices.astype(np.int64).tobytes())
            return super().compute(batch, logits_indices)

    def draw(self, batch: InputBatch, sampling: StepSampling) -> Sampled:
        """See `HostExecutor.draw`. The ranks draw from their parts of the vocabulary where the sampling allows it."""
        if not can_be_divided(sampling):
            return super().draw(batch, sampling)
        with self._exchange():
            count = sampling.step.max_num_logprobs
            self._send_steps(_DRAW, count)
            if self._draws is None:
                self._draws = _part_draws(batch.states, self.shards)
            draws, logprobs = _draw(self, self._draws, batch, count)
            return sampled_from(batch, best_of(draws), sampling, logprobs)

    def load_lora(self, lora_id: int, adapter: LoraAdapter) -> int:
        """See `LoraExecutor.load_lora`. Every rank holds the part of its matrices; the bytes are those of rank 0."""
        num_bytes = super().load_lora(lora_id, adapter)
        self._call(TorchExecutor.load_lora, lora_id, adapter)
        return num_bytes

    def drop_lora(self, lora_id: int) -> None:
        """See `LoraExecutor.drop_lora`."""
        super().drop_lora(lora_id)
        with suppress(EngineError):  # ranks that have ended hold nothing
            self._call(TorchExecutor.drop_lora, lora_id)

    def _call(self, method: Callable[..., object], *arguments: object) -> None:
        """Call a method of every further rank's executor, before the next step."""
        with self._exchange():
            self._ranks.send(_HEADER.pack(_CALL, 0, 0) + pickle.dumps((method, arguments)))

    def _send_steps(self, what: int, count: int, indices: bytes = b"") -> None:
        """Send the steps that were launched; ``what`` is asked for of the last."""
        unsent, self._unsent = self._unsent, []
        for capacity, data in unsent[:-1]:
            self._ranks.send(_HEADER.pack(_PREPARE, 0, capacity) + data)
        capacity, data = unsent[-1]
        self._ranks.send(_HEADER.pack(what, count, capacity) + indices + data)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Let the ranks exchange data in this block. An error or an interrupt in it ends them."""
        self._ranks.check()
        try:
            yield
        except Exception as error:
            raise self._ranks.failure(error) from error
        except BaseException:
            self._ranks.close()
            raise
        self._ranks.check()


def _part_draws(states: RequestStates, shards: Shards) -> PartDraws:
    return PartDraws(states, shards.all.part(states.vocab_size))


def _draw(executor: TorchExecutor, draws: PartDraws, batch: InputBatch, count: int) -> tuple[list[F64], list[F64]]:
    """Compute a step and draw from this rank's logits. Returns the draws of all ranks on the first, and what
    log-probabilities with ``count`` likeliest tokens take, nothing for −1.
    """
    shard = executor.shards.all
    with torch.inference_mode():
        logits = as_floats(executor.own_logits(batch, batch.logits_indices))
        own = torch.from_numpy(draws.draw(batch, logits))
        if count < 0:
            return [part.numpy() for part in shard.collect(own)], []
        found = [part.numpy() for part in shard.share(own)]
        parts = shard.collect(torch.from_numpy(draws.logprobs(logits, best_of(found)[:, LOGIT], count)))
        return found, [part.numpy() for part in parts]


def run_rank(rank: int, size: int, connection_descriptor: int, ring_descriptor: int) -> None:
    """Run the program of a further rank, until its connection ends."""
    connection = Connection(connection_descriptor)
    ring = PacketRing(size - 1, ring_descriptor)
    os.close(ring_descriptor)
    try:
        spec, weights, sizes, device, options = connection.recv()
        shards = Shards(rank, **sizes, timeout=options["rank_timeout"])
        device = device_of_rank(device, rank, size, torch.cuda.device_count())
        if device != "cpu":
            torch.cuda.set_device(device)
        executor = TorchExecutor(spec, weights, shards=shards, device=device, **sizes, **options)
        connection.send(None)
        shards.connect(connection.recv(), executor.device)
        connection.send(None)
        _run_packets(executor, PacketReader(ring, connection, rank - 1))
    except EOFError:
        return
    except Exception as error:
        with suppress(OSError):
            connection.send(error)
        sys.exit(1)


def _run_packets(executor: TorchExecutor, packets: PacketReader) -> None:
    shards = executor.shards
    states: RequestStates | None = None
    while True:
        packet = packets.receive()
        what, count, capacity = _HEADER.unpack_from(packet)
        if what == _CALL:
            method, arguments = pickle.loads(packet[_HEADER.size :])
            method(executor, *arguments)
            continue
        indices = np.frombuffer(packet, np.int64, count if what == _COMPUTE else 0, _HEADER.size).copy()
        difference = StepDifference.from_bytes(packet[_HEADER.size + indices.nbytes :])
        if states is None or difference.is_snapshot:
            states = states_of(difference.geometry or {}, rank=shards.positions.rank)
            buffers = InputBuffers.for_states(states, max_num_batched_tokens=capacity)
            draws = _part_draws(states, shards)
        batch = apply_difference(states, difference, buffers)
        executor.apply_block_ops(batch.block_ops)
        if what == _COMPUTE:
            executor.compute(batch, indices)
        elif what == _DRAW:
            _draw(executor, draws, batch, count)
