"""The objects that all models of a server share: its limits, and what it stores."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.server.admission import Admission
from foreword.server.config import ServerConfig
from foreword.server.responses import Responses
from foreword.server.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The admission of requests, files and batches, and stored responses."""

    admission: Admission
    store: Store
    responses: Responses

    @classmethod
    def of(cls, config: ServerConfig) -> Shared:
        """Return those of a server. Raise ConfigError for a data directory that cannot be used."""
        store = Store(config.data_directory, config.max_data_bytes)
        responses = Responses(store, store.max_bytes // 4, is_open=config.store_responses)
        return cls(Admission.of(config), store, responses)
