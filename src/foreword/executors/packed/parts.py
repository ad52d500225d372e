"""The parts of a native model: packed from weights, or taken from a packed file as they are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from math import prod
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from foreword.arrays import F32, U8
from foreword.errors import ModelError
from foreword.executors.options import NativeOptions
from foreword.executors.packed.file import PackedFile, PackedFileError, Part
from foreword.executors.packed.store import NotKeptError, PackedStore
from foreword.hashes import sha256
from foreword.models.digests import Digests, native_digest
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.quants import Quant, repacked
from foreword.models.spec import DecoderSpec
from foreword.models.weights import FileWeights, Tensor, Weights
from foreword.native import native

PACKING = 1
"""Raise this number when equal files are packed into other bytes or another layout although the native module is the
same.
"""
LEAST_BYTES = 16 << 20
"""The smallest size in bytes of weights that are kept packed. Smaller weights are packed in milliseconds."""

AS_IN_FILE = {
    Quant.F32: "f32",
    Quant.F16: "bf16",
    Quant.BF16: "bf16",
    Quant.Q4_0: "q4",
    Quant.Q4_1: "q4_min",
    Quant.Q4_K: "q4_min",
    Quant.Q5_0: "q8",
    Quant.Q8_0: "q8",
    Quant.Q5_1: "q8_min",
    Quant.Q5_K: "q8_min",
    Quant.Q6_K: "q8_half",
    Quant.MXFP4: "fp4",
    Quant.IQ4_NL: "iq4",
    Quant.IQ4_XS: "iq4",
    Quant.IQ3_S: "iq3_s",
    Quant.IQ3_XXS: "iq3_xxs",
    Quant.IQ2_XXS: "iq2_xxs",
    Quant.IQ1_S: "iq1_s",
    Quant.TQ1_0: "q4",
    Quant.TQ2_0: "q4",
    Quant.Q1_0: "q4",
    Quant.Q3_K: "q8_half",
    Quant.IQ2_S: "q8_half",
    Quant.IQ2_XS: "q8_half",
    Quant.IQ1_M: "q8_half",
    Quant.NVFP4: "q8_half",
}
"""Each number format of files whose integers native code keeps → the format that it packs them in
(native/kernels/formats.h).
"""
_REPACKED: dict[Quant, Literal["Q4_0", "INT8_16", "INT8_32"]] = {
    Quant.TQ1_0: "Q4_0",
    Quant.TQ2_0: "Q4_0",
    Quant.Q1_0: "Q4_0",
    Quant.IQ3_S: "INT8_32",
    Quant.IQ3_XXS: "INT8_32",
    Quant.IQ2_XXS: "INT8_32",
    Quant.IQ1_S: "INT8_32",
    Quant.Q3_K: "INT8_16",
    Quant.IQ2_S: "INT8_16",
    Quant.IQ2_XS: "INT8_16",
    Quant.IQ1_M: "INT8_16",
    Quant.NVFP4: "INT8_16",
}
"""Each number format that native code gets as equal weights in another format → that format."""

C = TypeVar("C", bound="native.CpuModel")
Screen = tuple[int, F32, float]
"""A matrix, errors and most: see `CpuModel.finish`."""

_ROWS = ".rows"  # the ending of the name of an embedding
_INPUTS = ".inputs"  # the ending of the name of the factors of a matrix's columns
_SCREEN, _ERRORS, _MOST = "screen", "screen.errors", "screen.most"


class Parts(Generic[C]):
    """Adds matrices and vectors to ``core`` by name. Each is packed from ``weights`` or taken from ``file``. A
    matrix or a weight is added once; further calls return its number.

    matrices, vectors: name → the number of a matrix, or of a weight that is a vector, in the core. inputs: see
    `scaled`. exact: integer weights take 15-bit activations. Methods raise PackedFileError if the file has no part with
    this name, shape and format.
    """

    def __init__(self, core: C, weights: Weights, *, exact: bool, file: PackedFile | None = None) -> None:
        self.core, self.matrices, self.vectors = core, dict[str, int](), dict[str, int]()
        self.inputs = dict[str, F32]()
        self.weights, self._exact, self._file = weights, exact, file
        self._formats: dict[str, str] = {}
        self._arrays: dict[str, Part] = {}  # packed parts that are not in the core
        self._sources: dict[str, tuple[U8, str]] = {}

    @property
    def is_mapped(self) -> bool:
        """Return whether the parts are in a mapped file, whose memory all processes and engines share."""
        return self._file is not None

    def matrix(self, name: str, target: str) -> int:
        """Add a weight as a matrix in the format ``target``."""
        if name in self.matrices:
            return self.matrices[name]
        tensor = self.weights[name]
        rows, cols = prod(tensor.shape[:-1]), tensor.shape[-1]
        form = self._formats[name] = f"{rows} x {cols} {target}"
        if self._file is None:
            number = self.core.pack(*(self._sources.pop(name, None) or source_of(tensor)), cols, target, self._exact)
        else:
            panels = self._file.array(name, form)
            number = self.core.attach(panels, rows, cols, target, self._exact)
        self.matrices[name] = number
        return number

    def again(self, name: str, of: str) -> int:
        """Return another number for the matrix ``of``, under the name of what adapters change there."""
        number = self.matrices[name] = self.core.again(self.matrices[of])
        return number

    def computed(self, name: str, make: Callable[[], F32], shape: tuple[int, int], target: str) -> int:
        """Add the matrix that ``make`` computes, float32 [rows, columns], in the format ``target``."""
        if name in self.matrices:
            return self.matrices[name]
        rows, cols = shape
        form = self._formats[name] = f"{rows} x {cols} {target}"
        if self._file is None:
            values = np.ascontiguousarray(make(), np.float32)
            number = self.core.pack(values.view(np.uint8), "F32", cols, target, False)
        else:
            number = self.core.attach(self._file.array(name, form), rows, cols, target, False)
        self.matrices[name] = number
        return number

    def scaled(self, name: str, make: Callable[[], F32], shape: tuple[int, int]) -> int:
        """Add a weight as a matrix of floats, its columns times the factors that ``make`` computes, which are kept in
        ``inputs``.
        """
        factors = self.inputs[name] = self.table(name + _INPUTS, make)
        return self.computed(name, lambda: self.weights[name].dequantize() * factors, shape, "f32")

    def vector(self, name: str, make: Callable[[], F32]) -> int:
        """Add the vector that ``make`` computes, in float32."""
        return self.core.vector(self.table(name, make).ravel())

    def weight(self, name: str) -> int:
        """Add a weight as a vector."""
        if name not in self.vectors:
            self.vectors[name] = self.vector(name, self.weights[name].dequantize)
        return self.vectors[name]

    def table(self, name: str, make: Callable[[], F32]) -> F32:
        """Return the array that ``make`` computes, in float32."""
        if self._file is not None:
            return self._file.array(name, "float32")
        values = np.ascontiguousarray(make(), np.float32)
        self._arrays[name] = Part("float32", values)
        return values

    def embedding(self, name: str, hidden_size: int) -> None:
        """Give the core the rows of the embedding, which it reads in place."""
        self.core.set_embedding(*self.rows(name, hidden_size))

    def rows(self, name: str, size: int) -> tuple[U8, str, int]:
        """Return the rows of a table of embeddings, which a core reads in place, with their format and size."""
        tensor = self.weights[name]
        form = f"rows of {size} {tensor.quant.name}"
        if self._file is None:
            data, quant = self._sources[name] = source_of(tensor)
            self._arrays[name + _ROWS] = Part(form, data)
        else:
            data = self._file.array(name + _ROWS, form)
            quant = _source(tensor.quant)
        return data, quant, size

    def screen(self, head: int) -> Screen | None:
        """Return the screen of the output projection ``head`` (docs/decisions/0021); None if there is none yet."""
        if self._file is None or _ERRORS not in self._file:
            return None
        rows, cols = self._head_shape()
        own = head
        if _SCREEN in self._file:
            own = self.core.attach(self._file.array(_SCREEN, f"{rows} x {cols} i8"), rows, cols, "i8", False)
        return own, self._file.array(_ERRORS, "float32"), float(self._file.array(_MOST, "float32")[0])

    def packed(self) -> dict[str, Part]:
        """Return all parts of a complete core that was packed from weights."""
        own = {name: Part(form, self.core.panels(self.matrices[name])) for name, form in self._formats.items()}
        if (screen := self.core.screen()) is not None:
            panels, errors, most = screen
            rows, cols = self._head_shape()
            if panels is not None:
                own[_SCREEN] = Part(f"{rows} x {cols} i8", panels)
            own |= {_ERRORS: Part("float32", errors), _MOST: Part("float32", np.array([most], np.float32))}
        return own | self._arrays

    def _head_shape(self) -> tuple[int, int]:
        rows, cols = self.weights["embed"].shape
        return rows, cols


def built(
    make: Callable[[], C],
    fill: Callable[[Parts[C]], None],
    weights: Weights,
    options: NativeOptions,
    spec: DecoderSpec | EncoderSpec,
    what: str,
) -> Parts[C]:
    """Return the parts of the core that ``make`` creates and ``fill`` fills.

    Weights of files are packed by the first process, which keeps them in a file. Later processes, and the first one
    itself, map that file. Where a file cannot be written or mapped, weights are packed in the memory of the process,
    with a warning.

    spec: the spec of the model, which may be a part of the model in the files. what: a name of what is packed, added to
    the format.
    """

    def filled(core: C, file: PackedFile | None = None) -> Parts[C]:
        parts = Parts(core, weights, exact=options.weight_format == "auto", file=file)
        fill(parts)
        return parts

    core, size = make(), _size(weights)
    if not isinstance(weights, FileWeights) or not _are_kept(size, options):
        return filled(core)
    store = PackedStore(options.weight_cache_bytes)
    packed: Parts[C] | None = None
    try:
        recipe = _recipe(weights, spec, core.isa, f"{what} {options.weight_format}")
        file = store.find(recipe)
        if file is None:
            with store.writing(recipe, size) as out:
                if out is not None:
                    packed = filled(core)
                    store.keep(out, recipe, packed.packed())
            packed = None
            del core  # with its memory, before another one takes as much
            core, file = make(), store.find(recipe)
        if file is not None:
            return filled(core, file)
        reason = "another process deleted them"
    except (NotKeptError, PackedFileError) as error:
        reason = str(error)
    warnings.warn(
        f"packed weights are not kept: {reason}. They are packed in the memory of this process, which makes its start "
        "slower and shares nothing; weight_cache_bytes=0 does the same without this warning",
        stacklevel=2,
    )
    return packed or filled(make())


def mapping_key(weights: Weights, options: NativeOptions, spec: DecoderSpec | EncoderSpec, what: str) -> str | None:
    """Return a key that is equal for weights that `built` maps from one file; None for weights that it keeps in no
    file.
    """
    if not isinstance(weights, FileWeights) or not _are_kept(_size(weights), options):
        return None
    files = [file.identity for file in weights.files]
    return repr((f"{what} {options.weight_format}", files, spec, sorted(weights.config.items(), key=repr)))


def _size(weights: Weights) -> int:
    return sum(tensor.stored.nbytes for tensor in weights.values())


def _are_kept(size: int, options: NativeOptions) -> bool:
    """Return whether weights of this size are kept in a file. Those of several teams are not, because each team has its
    own copy on its node.
    """
    return options.numa_nodes in (None, 1) and min(options.weight_cache_bytes, size) >= LEAST_BYTES


def source_of(tensor: Tensor) -> tuple[U8, str]:
    """Return the weights in a format that the native model reads, and its name."""
    if (form := _REPACKED.get(tensor.quant)) is not None:
        data = repacked(tensor.data, tensor.quant, form)
    elif tensor.quant in AS_IN_FILE:
        data = np.ascontiguousarray(tensor.data)
    else:
        data = tensor.dequantize().view(np.uint8)
    return data, _source(tensor.quant)


def source_bytes(tensor: Tensor) -> int:
    """Return the bytes of the weights that `source_of` returns."""
    if tensor.quant in AS_IN_FILE and tensor.quant not in _REPACKED:
        return tensor.stored.nbytes
    per_weight = {"Q4_0": 18 / 32, "INT8_16": 20 / 16, "INT8_32": 36 / 32, "F32": 4}
    return round(prod(tensor.shape) * per_weight[_source(tensor.quant)])


def _source(quant: Quant) -> str:
    """Return the name of the format in which native code gets weights of a file."""
    return _REPACKED.get(quant) or (quant.name if quant in AS_IN_FILE else Quant.F32.name)


def _recipe(weights: FileWeights, spec: DecoderSpec | EncoderSpec, isa: str, what: str) -> dict[str, Any]:
    """Return the inputs that packed weights are computed from.

    The version is imported in this function, because its module imports this one indirectly. Raise NotKeptError if the
    file of the native module is not the one that this process runs.
    """
    try:
        code = native_digest()
    except ModelError as error:
        raise NotKeptError(str(error)) from None
    digests = Digests()
    config = json.dumps(weights.config, sort_keys=True, default=repr)
    return {
        "packing": PACKING,
        "foreword": import_module("foreword").__version__,
        "native": code,
        "isa": isa,
        "what": what,
        "files": [digests.sha256_of(file) for file in weights.files],
        "spec": sha256(repr(spec).encode()).hexdigest(),
        "config": sha256(config.encode()).hexdigest(),
    }
