"""LoRA adapters that were loaded while an application runs, for replicas that start later.

An actor of Ray has them, from the first load to the last unload. It belongs to the application's name: a new deployment
of it has the same adapters.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

NAMESPACE = "foreword"


class _Bodies:
    """The actor: bodies of loads, by the adapter's name."""

    def __init__(self) -> None:
        self._bodies: dict[str, dict[str, Any]] = {}

    def change(self, name: str, body: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Set a body, or remove it. Return all of them."""
        self._bodies.pop(name, None)
        if body is not None:
            self._bodies[name] = body
        return self._bodies

    def all(self) -> dict[str, dict[str, Any]]:
        return self._bodies


class Adapters:
    """The adapters of the application with this name."""

    def __init__(self, application: str) -> None:
        self._name = f"adapters of {application}"

    async def all(self) -> dict[str, dict[str, Any]]:
        """Return the bodies of loads, by name."""
        actor = self._actor()
        try:
            return {} if actor is None else await actor.all.remote()
        except RayError:  # it ended meanwhile, and has none
            return {}

    async def keep(self, name: str, body: dict[str, Any] | None) -> None:
        """Set a body, or remove it."""
        actor = self._actor()
        if actor is None:
            if body is None:
                return
            actor = ray.remote(_Bodies).options(
                name=self._name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0
            ).remote()  # fmt: skip
        if not await actor.change.remote(name, body):
            ray.kill(actor)

    def _actor(self) -> Any:
        try:
            return ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            return None
