"""The models of a server of several, from their files to the contexts of requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from foreword.engine.async_llm import AsyncLLM
from foreword.engine.build import load
from foreword.engine.footprint import footprint
from foreword.engine.llm import LLM
from foreword.engine.model import OF_PARTS, OF_WHOLE, Model
from foreword.engine.options import GivenOptions, LLMOptions, decoders_only, split_options
from foreword.engine.step_turns import StepTurns
from foreword.errors import ModelError, UnsupportedModelError
from foreword.executors.host import HostExecutor
from foreword.executors.kinds import TRANSFORMERS
from foreword.executors.options import VisionOptions
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.loader import LoadedModel, find_model, load_model
from foreword.models.safetensors import read_directory
from foreword.server.config import ENGINE_DEFAULTS, ServerConfig
from foreword.server.context import Context
from foreword.server.models import Memory
from foreword.server.run import notes_of, traces_of, with_slots
from foreword.server.served import ServedModel
from foreword.server.shared import Shared

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number


class Loader:
    """Reads models for a server of so many, whose engines take turns, unless they compute on a GPU."""

    def __init__(self, config: ServerConfig, shared: Shared, num_models: int) -> None:
        self.config, self.shared, self.num_models = config, shared, num_models
        self.turns = StepTurns()

    def __call__(self, served: ServedModel, loras: Mapping[str, str | Path], take: Callable[[int], None]) -> ReadFiles:
        """Read the files of a model, which are fetched if they are not here. Errors are those of `LLM`.

        take: called with the bytes of the weights before the library transformers reads them into memory.
        """
        files, own = _fitted(served)
        options: LLMOptions = {**ENGINE_DEFAULTS, **own, "loras": loras, "media": self.config.media}
        given = split_options(options)
        if given.executor in ("auto", TRANSFORMERS.name) and not isinstance(files, LoadedModel):
            files = _own(served, given)
            if isinstance(files, str) and (num_bytes := _bytes_of_transformers(files, given)):
                take(num_bytes)
        model = load(files, given.executor, given.of_executor)
        size = footprint(model, given.config, budget=self.config.ram_budget, num_models=self.num_models)
        if size.pool and options.get("kv_cache_bytes") is None and options.get("num_blocks") is None:
            options["kv_cache_bytes"] = size.pool
        key = model.weights_key(model.configured(given.config))
        return ReadFiles(self, served, model, options, Memory(size.total, size.weights, key))


def _own(served: ServedModel, given: GivenOptions) -> str | LoadedModel:
    """Return a model of Foreword's own loader, or the name of one that the library transformers loads."""
    if given.executor == TRANSFORMERS.name:
        return served.model
    try:
        return load_model(served.model, mmproj=VisionOptions.given_mmproj(given.of_executor))
    except UnsupportedModelError:
        return served.model


def _bytes_of_transformers(model: str, given: GivenOptions) -> int:
    """Return the bytes of the host's memory that the weights in a directory take, by the headers of their files; 0 on a
    GPU, and where there are no such files.
    """
    options = TRANSFORMERS.read_options(given.of_executor)
    folder, _ = find_model(model)
    if not options.is_on_host or not folder.is_dir():
        return 0
    try:
        entries = read_directory(folder).values()
    except ModelError:  # files of another kind
        return 0
    width = _WIDTHS.get(options.dtype)
    return sum(entry.rows.nbytes if width is None else width * prod(entry.shape) for entry in entries)


def _fitted(served: ServedModel) -> tuple[str | LoadedModel, LLMOptions]:
    """Return a model, which is read if need be, and its options. Of those that were given for all models, an encoder
    has not those of decoders, nor a decoder of whole texts those of parts; max_model_len is at most the model's own.
    Errors are those of `load_model`.
    """
    if not served.common or served.options.get("executor") == TRANSFORMERS.name:
        return served.model, served.options
    try:
        found = load_model(served.model, mmproj=VisionOptions.given_mmproj(served.options))
    except UnsupportedModelError:  # the library transformers may load it
        return served.model, served.options
    spec = found.spec
    if isinstance(spec, EncoderSpec):
        left_out, longest = decoders_only() | OF_WHOLE, spec.max_model_len
    else:
        left_out, longest = frozenset() if spec.is_causal else OF_PARTS | OF_WHOLE, spec.longest_model_len
    left_out &= served.common
    own = cast(LLMOptions, {name: value for name, value in served.options.items() if name not in left_out})
    length = own.get("max_model_len")
    if isinstance(length, int) and "max_model_len" in served.common:
        own["max_model_len"] = min(length, longest)
    return found, own


@dataclass(slots=True)
class ReadFiles:
    """A model that is read, and the memory that it needs."""

    loader: Loader
    served: ServedModel
    model: Model[Any]
    options: LLMOptions
    memory: Memory

    def load(self) -> Context:
        """Make the engine. Errors are those of `LLM`."""
        slots, options = with_slots(self.loader.config, self.options)
        turns = self.loader.turns if self.model.options.is_on_host else None
        llm = AsyncLLM.of(LLM(self.model, **options), turns=turns)
        if slots is not None:
            slots.attach(llm.engine)
        executor = llm.engine.executor
        if not (isinstance(executor, HostExecutor) and executor.maps_weights):
            self.memory = self.memory._replace(key=None)
        name = self.served.names[0]
        for line in notes_of(llm):
            print(f"foreword: {name}: {line}", file=sys.stderr, flush=True)
        return Context(
            engine=llm,
            tokenizer=llm.tokenizer,
            media=llm.media,
            names=self.served.names,
            path=llm.model.path,
            config=self.loader.config,
            trace=traces_of(self.loader.config, name),
            slots=slots,
            shared=self.loader.shared,
        )
