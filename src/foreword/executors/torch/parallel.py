"""Tensor parallelism: the torch executor as rank 0, and a process for each further rank.

A rank gets each step as its `StepDifference` over a socket, prepares the same batch and computes its shard.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Thread, current_thread
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from foreword.arrays import F32, I64
from foreword.batch import InputBatch, InputBuffers, RequestStates
from foreword.batch.difference import DifferenceRecorder, StepDifference, apply_difference
from foreword.batch.difference.mirror import states_of
from foreword.batch.step.tensors import buffers_of
from foreword.errors import ConfigError, EngineError
from foreword.executors.executor import Capability
from foreword.executors.host import HostStep
from foreword.executors.torch.executor import TorchExecutor
from foreword.executors.torch.shard import Shard
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights
from foreword.sampling import StepSampling

_HEADER = struct.Struct("<qq")  # logits of the step, −1 for one that is not computed; capacity of its buffers


class TensorParallelExecutor(TorchExecutor):
    """A `TorchExecutor` whose heads, MLPs and vocabulary are divided among ``tensor_parallel_size`` processes.

    Options are those of `TorchExecutor`; num_threads is per rank, by default an equal part. LoRA is not supported.
    The processes end with this object. After a rank has ended, or a step was interrupted, every step is an EngineError.

    ConfigError for a size that does not divide the heads and for another device than the CPU.
    """

    capabilities = TorchExecutor.capabilities - {Capability.LORA}

    def __init__(
        self, spec: DecoderSpec, weights: Weights, *, tensor_parallel_size: int, device: str = "cpu", **options: Any
    ) -> None:
        size = tensor_parallel_size
        if size < 2:
            raise ConfigError(f"tensor_parallel_size={size}: must be at least 1; 1 is `TorchExecutor`")
        if device != "cpu":
            raise ConfigError(f"tensor_parallel_size={size}: needs device='cpu', not {device!r:.80}")
        shard = Shard(0, size)
        shard.spec(spec)
        if options.get("num_threads") is None:
            options["num_threads"] = max(1, torch.get_num_threads() // size)
        self._ranks = _Ranks(size)
        weakref.finalize(self, self._ranks.close)
        try:
            self._ranks.send_object((spec, weights, options))
            super().__init__(spec, weights, shard=shard, **options)
            self._ranks.connect(shard)
        except BaseException:
            self._ranks.close()
            raise
        self._states: weakref.ref[RequestStates] | None = None
        self._recorder: DifferenceRecorder | None = None
        self._unsent: list[tuple[int, bytes]] = []

    def launch(self, batch: InputBatch, sampling: StepSampling) -> HostStep:
        """See `Executor.launch`. EngineError if a rank has ended."""
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
        data = self._recorder.take(batch).to_bytes()
        self._unsent.append((buffers_of(batch).max_num_batched_tokens, data))

    def _forget(self) -> None:
        """Stop following the states: the next step is a snapshot."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """See `HostExecutor.compute`. EngineError if a rank has ended."""
        self._ranks.check()
        try:
            unsent, self._unsent = self._unsent, []
            for i, (capacity, data) in enumerate(unsent):
                is_last = i == len(unsent) - 1
                indices = logits_indices.astype(np.int64).tobytes() if is_last else b""
                header = _HEADER.pack(len(logits_indices) if is_last else -1, capacity)
                self._ranks.send(header + indices + data)
            return super().compute(batch, logits_indices)
        except Exception as error:
            raise self._ranks.failure(error) from error
        except BaseException:
            self._ranks.close()
            raise


class _Ranks:
    """The processes of ranks 1, 2, …, and a thread that ends all of them when one ends."""

    def __init__(self, size: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._reason: str | None = None
        program = (
            "import sys; from foreword.executors.torch.parallel import run_rank; run_rank(*map(int, sys.argv[1:]))"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for rank in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-c", program, *map(str, (rank, size, theirs.fileno()))]
                self._processes.append(
                    subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment,
                        start_new_session=True,
                    )
                )  # fmt: skip
            self._connections.append(Connection(ours.detach()))
        self._thread = Thread(target=self._watch, daemon=True)

    def send_object(self, value: object) -> None:
        for connection in self._connections:
            connection.send(value)

    def send(self, data: bytes) -> None:
        for connection in self._connections:
            connection.send_bytes(data)

    def connect(self, shard: Shard) -> None:
        """Wait until every rank has loaded its weights, and join them. Raises the error of a rank that has not."""
        for rank, connection in enumerate(self._connections, 1):
            try:
                error = connection.recv()
            except (EOFError, OSError):
                raise EngineError(f"rank {rank} of the model ended while it was loaded") from None
            if error is not None:
                raise error
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.send_object(store.port)
        shard.connect(store.port)
        self._store = store
        self._thread.start()

    def check(self) -> None:
        """EngineError if a rank has ended."""
        if self._reason is not None:
            raise EngineError(f"{self._reason}; make a new LLM")

    def failure(self, error: Exception) -> EngineError:
        """End all ranks. The error of a step that failed for ``error``."""
        self._thread.join(2)  # it ends if a rank has ended
        self.close(f"a step of rank 0 failed: {type(error).__name__}: {error}")
        return EngineError(f"{self._reason}; make a new LLM")

    def close(self, reason: str = "the ranks of the model were ended") -> None:
        """End all ranks. Closing twice is harmless."""
        self._reason = self._reason or reason
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        if self._thread.is_alive() and current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        ready = wait(self._connections)
        if self._reason is not None:
            return
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        codes = [process.poll() for process in self._processes]
        killed = [rank for rank, code in enumerate(codes, 1) if code is not None and code < 0]
        if killed:
            code = codes[killed[0] - 1] or 0
            self.close(f"rank {killed[0]} of the model was ended by {signal.Signals(-code).name}")
            return
        rank = next(i for i, connection in enumerate(self._connections, 1) if connection in ready)
        try:
            error = self._connections[rank - 1].recv()
            self.close(f"rank {rank} of the model failed: {type(error).__name__}: {error}")
        except (EOFError, OSError):
            self.close(f"rank {rank} of the model ended with status {codes[rank - 1]}")


def run_rank(rank: int, size: int, descriptor: int) -> None:
    """The program of a further rank, until its connection ends."""
    connection = Connection(descriptor)
    try:
        spec, weights, options = connection.recv()
        shard = Shard(rank, size)
        executor = TorchExecutor(spec, weights, shard=shard, **options)
        connection.send(None)
        shard.connect(connection.recv())
        _run_steps(executor, connection)
    except EOFError:
        return
    except Exception as error:
        with suppress(OSError):
            connection.send(error)
        sys.exit(1)


def _run_steps(executor: TorchExecutor, connection: Connection) -> None:
    states: RequestStates | None = None
    while True:
        data = connection.recv_bytes()
        num_logits, capacity = _HEADER.unpack_from(data)
        indices = np.frombuffer(data, np.int64, max(0, num_logits), _HEADER.size).copy()
        difference = StepDifference.from_bytes(data[_HEADER.size + indices.nbytes :])
        if states is None or difference.is_snapshot:
            states = states_of(difference.geometry or {})
            buffers = InputBuffers.for_states(states, max_num_batched_tokens=capacity)
        batch = apply_difference(states, difference, buffers)
        executor.apply_block_ops(batch.block_ops)
        if num_logits >= 0:
            executor.compute(batch, indices)
