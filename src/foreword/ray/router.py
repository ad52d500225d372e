"""The routers of `foreword.routing` as request routers of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from foreword.cluster.prompts import TOKENS_PER_PIECE
from foreword.routing import Placement, make_router


class ForewordRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Chooses by the arguments ``num_tokens`` and ``pieces`` of a call; calls without go to the least work.

    It knows what went through this handle, so one ingress replica routes best.
    """

    def initialize_state(self, router: str = "prefix", most_replicas: int = 256) -> None:
        self._known = make_router(router, most_replicas)
        self._numbers: dict[ReplicaID, int] = {}
        self._free = list(range(most_replicas - 1, -1, -1))
        self._running: dict[str, Placement] = {}  # by the internal id of the request
        for number in self._free:
            self._known.close(number)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        ids = {replica.replica_id for replica in replicas}
        for gone in self._numbers.keys() - ids:
            number = self._numbers.pop(gone)
            self._known.close(number)
            for name in [name for name, placement in self._running.items() if placement.replica == number]:
                self._known.ended(self._running.pop(name))
            self._free.append(number)
        for new in ids - self._numbers.keys():
            number = self._numbers[new] = self._free.pop()
            self._known.open(number)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first, then the others, for the case that it is full."""
        by_number = {self._numbers[r.replica_id]: r for r in candidate_replicas if r.replica_id in self._numbers}
        if not by_number or pending_request is None:
            return [candidate_replicas]
        avoid = [number for number in self._numbers.values() if number not in by_number]
        given = pending_request.kwargs
        placement = self._known.choose(
            given.get("num_tokens", 1), given.get("pieces", ()), TOKENS_PER_PIECE, avoid=avoid
        )
        self._known.ended(placement)  # until it is sent
        pending_request.placement = placement
        chosen = by_number.pop(placement.replica)
        return [[chosen], list(by_number.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        placement: Placement | None = getattr(pending_request, "placement", None)
        number = self._numbers.get(replica_id)
        if placement is not None and number is not None:
            placed = Placement(number, placement.work)
            self._known.work[number] += placed.work
            self._running[pending_request.metadata.internal_request_id] = placed

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        placement = self._running.pop(internal_request_id, None)
        if placement is not None:
            self._known.ended(placement)
