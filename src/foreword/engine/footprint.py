"""Compute the memory of a model with its engine before the engine is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from foreword.engine.config import EngineConfig
from foreword.engine.memory import size_text
from foreword.engine.model import DecoderModel, Model
from foreword.errors import ConfigError
from foreword.models.loader import load_model


class Footprint(NamedTuple):
    """Bytes of a model in use: its weights as the executor holds them, its KV pool, a draft model or a head that drafts
    with a pool of its own, and the rows, activations and logits of its largest step.
    """

    weights: int
    pool: int
    draft: int
    others: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV pool": self.pool, "draft model": self.draft, "steps": self.others}
        texts = (f"{name} {size_text(size)}" for name, size in parts.items() if size)
        return f"{size_text(self.total)} ({', '.join(texts)})"


def footprint(model: Model[Any], config: EngineConfig, *, budget: int | None, num_models: int = 1) -> Footprint:
    """Return the memory of a model under settings of an engine.

    budget: bytes that the model may use; None: the memory of the machine. num_models: the number of models that share
    the budget. A pool without a configured size gets an equal part of the memory that the model's weights leave
    (`HostMemory.pool_bytes`). A model on a GPU takes none of the host's.

    Raise ConfigError, with figures, if the model does not fit into the budget, or if no request fits into its pool.
    """
    if not model.options.is_on_host:
        return Footprint(0, 0, 0, 0)
    config = model.configured(config)
    memory = model.memory(config)
    needed: dict[str, int] = {}
    if memory is not None:
        needed = {name: size for name, size in memory.needed.items() if name != "process"}
        if config.host_cache_bytes:
            needed["host cache"] = config.host_cache_bytes
        memory = replace(memory, needed=needed, num_engines=num_models)
        if budget is not None:
            memory = replace(memory, usable=budget, on_demand={}, limit="ram_budget")
    pool = model.pool(config, memory).num_bytes
    weights = needed.get("weights", 0) or model.weight_bytes
    draft, others = 0, sum(size for name, size in needed.items() if name != "weights")
    if config.speculation is not None and config.speculation.model is not None:
        drafting = DecoderModel(load_model(config.speculation.model), *model.kind.for_drafts(model.options))
        draft = drafting.weight_bytes + pool
    if config.speculation is not None and config.speculation.method == "head" and isinstance(model, DecoderModel):
        head = model.head()
        drafting = model.of_head(head)
        own = drafting.pool(replace(config, speculation=None, num_blocks=None), memory)
        draft = drafting.weight_bytes + head.weights["embed"].stored.nbytes + own.num_bytes
    found = Footprint(weights, pool, draft, others)
    if budget is not None and found.total > budget:
        fix = "Give more, or lower kv_cache_bytes, max_num_seqs or max_model_len"
        raise ConfigError(f"ram_budget={budget}: {model.name} needs {found}, of {size_text(budget)}. {fix}")
    return found
