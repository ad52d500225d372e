"""The part of a model that one of several ranks computes, and what the ranks exchange."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from foreword.errors import ConfigError
from foreword.executors.options import TorchOptions
from foreword.models.spec import DecoderSpec

_SLICE = timedelta(seconds=0.2)
"""The time of one wait of a rank: between two waits the process sees its signals."""


class Shard:
    """Part ``rank`` of ``size``, and the exchange with the processes that have the other parts.

    The processes run on one machine. Their group is this object's own, not the process's default one. With one rank no
    exchange takes place.

    timeout: seconds that an exchange waits for the other ranks; then it is a TimeoutError.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = TorchOptions.rank_timeout) -> None:
        self.rank, self.size, self._timeout = rank, size, timeout
        self._groups: dict[str, dist.Backend] = {}

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Join the groups for tensors on the CPU and on ``device``, of which every rank has this store. Every rank does
        so once, before the first exchange.
        """
        for kind, backend in backends_of(device).items():
            join = _join_nccl if backend == "nccl" else _join_gloo
            limit = timedelta(seconds=self._timeout)
            self._groups[kind] = join(dist.PrefixStore(kind, store), self.rank, self.size, limit)

    def abort(self) -> None:
        """End exchanges on GPUs, which else wait for a rank that has ended; those on the CPU fail by themselves."""
        if "cuda" in self._groups:
            self._groups["cuda"].abort()

    def part(self, count: int) -> range:
        """Return this rank's part of ``count`` rows or columns. The parts differ by at most one."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, x: Tensor) -> Tensor:
        """Add x up over the ranks, in its own memory. All ranks get equal bits."""
        if self.size > 1:
            self._wait(x, self._group(x).allreduce([x]))
        return x

    def max(self, x: Tensor) -> Tensor:
        """Return the largest of the ranks' values of each entry, in x's own memory."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._wait(x, self._group(x).allreduce([x], options))
        return x

    def collect(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, of one shape, on the first rank; nothing on the others."""
        if self.size == 1 or not x.numel():
            return [x] * (self.size if self.rank == 0 else 0)
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._wait(x, self._group(x).gather([parts] if parts else [], [x], dist.GatherOptions()))
        return parts

    def share(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, of one shape, on every rank."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(x, self._group(x).allgather([parts], [x]))
        return parts

    def gather(self, x: Tensor, count: int) -> Tensor:
        """Return the ranks' parts [N, part] side by side [N, count] on the first rank; x itself on the others."""
        if self.size == 1:
            return x
        sizes = [len(Shard(rank, self.size).part(count)) for rank in range(self.size)]
        own = x.new_empty(len(x), max(sizes))
        own[:, : x.shape[1]] = x
        parts = self.collect(own)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1) if parts else x

    def _group(self, x: Tensor) -> dist.Backend:
        assert self._groups, "connect comes before the first step"
        return self._groups[x.device.type]

    def _wait(self, x: Tensor, work: dist.Work) -> None:
        """Wait for an exchange of x. On a GPU the stream waits, on the CPU this thread."""
        if x.device.type != "cpu":
            work.wait()
            return
        end = time.monotonic() + self._timeout
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises why it failed, if it did
                    return
                if time.monotonic() > end:
                    raise too_late(self._timeout) from None


def too_late(timeout: float) -> TimeoutError:
    """Return the error where other ranks do not answer."""
    return TimeoutError(f"another rank did not answer within {timeout:g} s (rank_timeout)")


def backends_of(device: torch.device) -> dict[str, str]:
    """Return what exchanges tensors between ranks whose model is on ``device``, by the kind of device that has the
    tensors.
    """
    return {"cpu": "gloo", "cuda": "nccl"} if device.type == "cuda" else {"cpu": "gloo"}


def _join_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def _join_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Shards:
    """The part of a model that rank ``rank`` of tensor_parallel_size · context_parallel_size ranks computes.

    all: its part of every MLP and expert, and of the vocabulary. heads: its part of the heads, which the ranks with the
    same positions divide. positions: its part of the positions of keys and values, which the ranks with the same heads
    divide. timeout: of every `Shard`.
    """

    def __init__(
        self,
        rank: int = 0,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        timeout: float = TorchOptions.rank_timeout,
    ) -> None:
        self._timeout = timeout
        self.all = Shard(rank, tensor_parallel_size * context_parallel_size, timeout)
        head, position = divmod(rank, context_parallel_size)
        self.heads = self.all if context_parallel_size == 1 else Shard(head, tensor_parallel_size, timeout)
        self.positions = self.all if tensor_parallel_size == 1 else Shard(position, context_parallel_size, timeout)

    def connect(self, path: str, device: torch.device) -> None:
        """Join the groups by a file that all ranks share. device: that of this rank's model. Every rank does so once,
        before the first exchange.
        """
        store = dist.FileStore(path, -1)  # it allows any number of users: none of them removes the file
        store.set_timeout(timedelta(seconds=self._timeout))
        for name, shard in self._divided.items():
            shard.connect(dist.PrefixStore(name, store), device)

    def abort(self) -> None:
        """See `Shard.abort`."""
        for shard in self._divided.values():
            shard.abort()

    @property
    def _divided(self) -> dict[str, Shard]:
        """The groups with several ranks, each once, by a name that its ranks share."""
        found = {"all": self.all}
        if self.all not in (self.heads, self.positions):
            found |= {f"heads {self.positions.rank}": self.heads, f"positions {self.heads.rank}": self.positions}
        return {name: shard for name, shard in found.items() if shard.size > 1}

    def spec(self, spec: DecoderSpec) -> DecoderSpec:
        """Return the model with the heads of this rank alone. Raise ConfigError unless the ranks divide the heads
        evenly, and if norms need those of other ranks.
        """
        size, of_keys = self.heads.size, sorted({shape.num_kv_heads for shape in spec.head_shapes})
        of_queries = sorted({shape.num_heads for shape in spec.head_shapes})
        counts = (*of_queries, *of_keys)
        if any(count % size for count in counts):
            sizes = [n for n in range(1, of_keys[0] + 1) if not any(count % n for count in counts)]
            raise ConfigError(
                f"tensor_parallel_size={size}: must divide the model's {' and '.join(map(str, of_queries))} heads and "
                f"{' and '.join(map(str, of_keys))} key heads; use one of {', '.join(map(str, sizes))}"
            )
        has_cutoff = any(layer.gate_cutoff is not None for layer in spec.layers)
        if self.all.size > 1 and (has_cutoff or spec.inner_norms or spec.rounds_inputs):
            what = "norms or rounds all numbers in an MLP together"
            what = "compares the gates of an MLP with the mean of all" if has_cutoff else what
            reason = f"{spec.architecture} {what}, but a process has its own alone"
            raise ConfigError(f"{self.all.size} processes: {reason}; use 1")
        if size > 1 and spec.joint_qk_norm:
            raise ConfigError(
                f"tensor_parallel_size={size}: {spec.architecture} norms the queries of all heads together, but a rank "
                "has its own alone; use 1"
            )
        has_sinks = any(layer.has_sinks for layer in spec.layers)
        if self.positions.size > 1 and (has_sinks or spec.slopes):
            what = "attention sinks" if has_sinks else "slopes of scores (ALiBi)"
            raise ConfigError(
                f"context_parallel_size={self.positions.size}: {spec.architecture} has {what}, which ranks cannot "
                "merge; use 1"
            )
        if self.positions.size > 1 and spec.indexer is not None:
            raise ConfigError(
                f"context_parallel_size={self.positions.size}: {spec.architecture} has indexers that choose among all "
                "keys, but a rank has its own alone; use 1"
            )
        layers = tuple(
            layer
            if (of := layer.heads) is None
            else replace(layer, heads=of._replace(num_kv_heads=of.num_kv_heads // size, num_heads=of.num_heads // size))
            for layer in spec.layers
        )
        return replace(spec, num_heads=spec.num_heads // size, num_kv_heads=spec.num_kv_heads // size, layers=layers)
