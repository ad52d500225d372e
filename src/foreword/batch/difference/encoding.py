"""The bytes of a `StepDifference`: a JSON header, then raw little-endian arrays. The format: docs/difference.md."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from foreword.arrays import I32, AnyArray
from foreword.batch.values.integers import INT32_MAX
from foreword.batch.values.lora import LoraRequest
from foreword.batch.values.multimodal import MultiModalFeature
from foreword.batch.values.pooling import PoolingParams
from foreword.batch.values.sampling_params import SamplingParams
from foreword.errors import ForewordError, PlanError, RequestError

MAGIC, VERSION = b"FWSD", 1
_PREFIX = struct.Struct("<4sIII")  # magic, version, header bytes, CRC-32 of all bytes after the prefix
_INTEGERS = tuple((np.dtype(name), np.iinfo(name)) for name in ("u1", "i1", "<u2", "<i2", "<i4", "<i8"))
_DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in ("b1", "u1", "i1", "u2", "i2", "i4", "i8", "f2", "f4", "f8")
}


def malformed(what: str, *, expected: object = None, got: object = None) -> PlanError:
    """The error for bytes, or a difference, that do not follow the format. ``what`` names the part."""
    return PlanError("malformed step difference", tensor=what, expected=expected, got=got)


def pack(header: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> bytes:
    """The bytes of a header of JSON values and of arrays, integers in the smallest dtype that holds their values."""
    stored = {name: _narrowed(name, array) for name, array in arrays.items()}
    table = [[name, array.dtype.str.lstrip("<|"), *array.shape] for name, array in stored.items()]
    text = json.dumps({**header, "arrays": table}, separators=(",", ":"), allow_nan=False).encode()
    body = b"".join([text, *(array.tobytes() for array in stored.values())])
    return _PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(body)) + body


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, AnyArray]]:
    """Header and arrays; the arrays are read-only views of the bytes. PlanError where they do not follow the format."""
    if len(data) < _PREFIX.size:
        raise malformed("length", expected=f"{_PREFIX.size} bytes or more", got=len(data))
    magic, version, size, checksum = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise malformed("magic", expected=MAGIC, got=magic)
    if version != VERSION:
        raise malformed("version", expected=VERSION, got=version)
    body = memoryview(data)[_PREFIX.size :]
    if zlib.crc32(body) != checksum:
        raise malformed("checksum", expected=checksum, got=zlib.crc32(body))
    if size > len(body):
        raise malformed("header length", expected=f"at most {len(body)}", got=size)
    try:
        header = json.loads(bytes(body[:size]))
    except (ValueError, RecursionError) as error:
        raise malformed("header", expected="JSON", got=type(error).__name__) from None
    table = header.pop("arrays", None) if isinstance(header, dict) else None
    if not isinstance(table, list):
        raise malformed("header", expected='an object with "arrays"', got=type(header).__name__)
    arrays: dict[str, AnyArray] = {}
    start = size
    for entry in table:
        name, dtype, shape = _described(entry)
        count = math.prod(shape)
        if name in arrays or count * dtype.itemsize > len(body) - start:
            raise malformed(f"arrays: {name}", expected=f"one array of at most {len(body) - start} bytes", got=entry)
        array = np.frombuffer(body, dtype if dtype.kind != "b" else np.uint8, count, start)
        if dtype.kind == "b":
            if count and array.max() > 1:
                raise malformed(name, expected="0 or 1", got=int(array.max()))
            array = array.view(np.bool_)
        arrays[name] = array.reshape(shape)
        start += count * dtype.itemsize
    if start != len(body):
        raise malformed("length", expected=_PREFIX.size + start, got=len(data))
    return header, arrays


def _described(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if not isinstance(entry, list) or not 3 <= len(entry) <= 6 or not isinstance(entry[0], str):
        raise malformed("arrays", expected="[name, dtype, sizes …]", got=entry)
    name, dtype, *shape = entry
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise malformed(f"arrays: {name}", expected=f"one of {', '.join(_DTYPES)}", got=dtype)
    if any(type(n) is not int or not 0 <= n < 2**40 for n in shape):
        raise malformed(f"arrays: {name}", expected="sizes of 0 or more", got=shape)
    return name, _DTYPES[dtype], tuple(shape)


def _narrowed(name: str, array: AnyArray) -> AnyArray:
    """The array in the dtype in which it is stored. PlanError for a dtype that the format does not have."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        smallest = next((dtype for dtype, limits in _INTEGERS if limits.min <= low and high <= limits.max), None)
        if smallest is not None:
            return array.astype(smallest, copy=False)
    elif array.dtype.kind in "bf" and array.dtype.itemsize <= 8:
        return array.astype(array.dtype.newbyteorder("<"), copy=False)
    raise malformed(name, expected="booleans, integers that fit int64, or floats of 2, 4 or 8 bytes", got=array.dtype)


# -- sampling parameters as JSON ---------------------------------------------------------------------------------------

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}


def params_to_json(params: SamplingParams, req_id: str | None) -> dict[str, Any]:
    """The parameters that differ from the defaults. RequestError for a value that JSON cannot hold.

    logit_bias: [[token id, value], …], with null for −inf.
    """
    out: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value is default or (type(value) is type(default) and value == default):
            continue
        if name == "logit_bias":
            value = [[int(t), None if v == -math.inf else float(v)] for t, v in value.items()]
        try:
            out[name] = json.loads(json.dumps(value, default=_plain, allow_nan=False))
        except (TypeError, ValueError):
            reason = "cannot be written as JSON, so it cannot be part of a step difference"
            raise RequestError(req_id, name, value, reason, "Use numbers, strings, lists and dictionaries.") from None
    return out


def params_from_json(value: Any) -> SamplingParams:
    """The inverse, with tuples for lists. PlanError for unknown names, RequestError for values out of range."""
    if not isinstance(value, dict) or not value.keys() <= _DEFAULTS.keys():
        raise malformed("params", expected="an object with fields of SamplingParams", got=value)
    given = {name: _as_tuple(v) if isinstance(v, list) else v for name, v in value.items()}
    try:
        if given.get("logit_bias") is not None:
            given["logit_bias"] = {t: -math.inf if v is None else v for t, v in given["logit_bias"]}
        params = SamplingParams(**given)
        params.check()
    except ForewordError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise malformed("params", expected="values of SamplingParams", got=str(error)) from None
    return params


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays, sets and other sequences as JSON values."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


# -- what few requests have, and the header, as JSON ------------------------------------------------------------

_EXTRA_ARRAYS = ("prompt_embeds", "prompt_is_token_id", "mrope_positions")


def extras_to_json(i: int, values: Mapping[str, Any], arrays: dict[str, AnyArray]) -> dict[str, Any]:
    """The values as JSON, with their arrays in ``arrays``."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if name in _EXTRA_ARRAYS:
            arrays[f"{name}.{i}"] = np.asarray(value)
        elif name == "mm_features":
            out[name] = [[f.identifier, f.offset, f.length, f.modality] for f in value]
            masks = {f"is_embed.{i}.{j}": f.is_embed for j, f in enumerate(value) if f.is_embed is not None}
            arrays |= {key: np.asarray(mask, np.bool_) for key, mask in masks.items()}
        elif name == "lora_request":
            out[name] = [value.lora_id, value.name, value.path]
        elif name == "pooling_params":
            out[name] = [value.task, value.dimensions, value.normalize]
        else:
            out[name] = value
    return out


def extras_from_json(i: int, given: Any, arrays: dict[str, AnyArray]) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: arrays.pop(f"{name}.{i}").copy() for name in _EXTRA_ARRAYS if f"{name}.{i}" in arrays
    }
    try:
        for name, value in given.items():
            match name:
                case "mm_features":
                    values[name] = tuple(
                        _feature(f, arrays.pop(f"is_embed.{i}.{j}", None)) for j, f in enumerate(value)
                    )
                case "lora_request":
                    lora_id, lora_name, path = value
                    values[name] = LoraRequest(lora_id, str(lora_name), str(path))
                case "pooling_params":
                    task, dimensions, normalize = value
                    values[name] = PoolingParams(task=task, dimensions=dimensions, normalize=normalize)
                case "mrope_delta" | "encoder_len":
                    values[name] = value
                case _:
                    raise malformed("extras", expected="a field of NewRequest", got=name)
    except ForewordError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise malformed("extras", expected="fields of NewRequest", got=str(error)) from None
    if "mrope_positions" in values:
        values["mrope_positions"] = mrope(f"mrope_positions.{i}", values["mrope_positions"])
    return values


def _feature(given: Sequence[Any], is_embed: AnyArray | None) -> MultiModalFeature:
    identifier, offset, length, modality = given
    if type(offset) is not int or type(length) is not int:
        raise malformed("mm_features", expected="an integer range", got=(offset, length))
    mask = None if is_embed is None else is_embed.astype(np.bool_)
    return MultiModalFeature(str(identifier), offset, length, mask, str(modality))


def mrope(name: str, positions: AnyArray) -> I32:
    if positions.ndim != 2 or positions.dtype.kind not in "iu":
        raise malformed(name, expected="integers [dims, tokens]", got=f"{positions.dtype} {positions.shape}")
    return np.array(positions, np.int32)


def number(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 10:
        raise malformed(name, expected="a number", got=text)
    return int(text)


class Header:
    """The header's values, each checked for its type."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = dict(values)

    def of(self, name: str, kind: type, default: Any) -> Any:
        value = self._left.pop(name, default)
        if value is not default and type(value) is not kind:
            raise malformed(name, expected=kind.__name__, got=value)
        return value

    def integer(self, name: str) -> int:
        value = self.of(name, int, None)
        if value is None or not -(2**63) <= value < 2**63:
            raise malformed(name, expected="an integer", got=value)
        return int(value)

    def pair(self, name: str) -> tuple[int, int]:
        value = self.of(name, list, None)
        if value is None:
            return -1, -1
        if len(value) != 2 or any(type(n) is not int or not -1 <= n <= INT32_MAX for n in value):
            raise malformed(name, expected="[tokens, requests]", got=value)
        return value[0], value[1]

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.of(name, list, None) or []
        if any(type(text) is not str for text in value):
            raise malformed(name, expected="strings", got=value)
        return tuple(value)

    def bynumber(self, name: str) -> dict[int, Any]:
        value = self.of(name, dict, None) or {}
        return {number(name, key): entry for key, entry in value.items()}

    def finish(self) -> None:
        """PlanError for a value that the format does not have."""
        if self._left:
            raise malformed(next(iter(self._left)), expected="a value of this format")
