"""compressed-tensors, as llm-compressor writes them. NAME is that of the matrix, with ``weight`` at its end.

| format                             | tensors beside NAME_scale                                    | arithmetic       |
|------------------------------------|--------------------------------------------------------------|------------------|
| pack-quantized                     | NAME_packed (I32), NAME_shape, if not symmetric              | `IntegerRows`    |
|                                    | NAME_zero_point (I32), with sorted columns NAME_g_idx        |                  |
| int-quantized, or naive-quantized  | NAME (I8), if not symmetric NAME_zero_point (I8)             | `IntegerRows`    |
| float-quantized, or naive-         | NAME (F8_E4M3)                                               | `fp8_matrix`     |
| nvfp4-pack-quantized               | NAME_packed (U8), NAME_global_scale; scales in F8_E4M3       | `nvfp4_matrix`   |
| mxfp4-pack-quantized               | NAME_packed (U8); scales in U8                               | `mxfp4_tensor`   |

The tensors of a matrix tell its format, and each matrix must fit one of ``config_groups``; ``targets`` and ``ignore``
say nothing more then. Activations are not quantised here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import NamedTuple

from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.quantized.fp8 import fp8_matrix, sizes
from foreword.models.quantized.integers import IntegerRows
from foreword.models.quantized.matrix import MOST_COLUMNS, SAME_MODEL, WITHOUT_IT, Found, check_unread, one_of, part
from foreword.models.quantized.mxfp4 import mxfp4_tensor
from foreword.models.quantized.nvfp4 import nvfp4_matrix
from foreword.models.safetensors import Entry

_PACKED, _INT, _FLOAT = "pack-quantized", "int-quantized", "float-quantized"
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_READ = {_PACKED: ("int", 4, 8), _INT: ("int", 4, 8), _FLOAT: ("float", 8), _NVFP4: ("float", 4), _MXFP4: ("float", 4)}
"""The type and the numbers of bits of each format."""
_NAIVE, _MIXED = "naive-quantized", "mixed-precision"
_OF_GROUPS = ("weights", "targets", "format", "input_activations", "output_activations")
_WITHOUT_EFFECT = ("strategy", "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs")
"""Keys of weights that the tensors show, or that describe how they were made."""


class _Group(NamedTuple):
    """The settings of a group for weights. group_size: 0 if a scale is for a row or for the matrix. is_sorted: whether
    a tensor has the group of each column.
    """

    form: str
    bits: int
    group_size: int
    is_symmetric: bool
    block: tuple[int, int] | None
    is_sorted: bool

    def __str__(self) -> str:
        scales = f"blocks of {self.block}" if self.block else f"groups of {self.group_size or 'a row'}"
        return f"{self.form}, {'' if self.is_symmetric else 'not '}symmetric, {self.bits} bit, {scales}"

    def has_scales(self, shape: tuple[int, ...], rows: int, columns: int) -> bool:
        """Return whether the scales of a matrix have this shape."""
        if self.block or self.group_size:
            height, width = self.block or (1, self.group_size)
            return shape == (ceil(rows / height), ceil(columns / width))
        return shape in ((rows, 1), (rows,), (1, 1), (1,))


def compressed_matrices(entries: Mapping[str, Entry], settings: Config, method: str) -> Iterator[Found]:
    """Yield the matrices of a checkpoint by compressed-tensors. Raise ModelError if the tensors of one do not fit each
    other or any of the groups.
    """
    groups = list(_groups(settings))
    for key, weight in entries.items():
        name = key.removesuffix("_packed")
        expected = ("I8", "F8_E4M3") if name == key else ("I32", "U8")
        if not name.endswith("weight") or (name == key and weight.dtype not in expected):
            continue
        whole = entries.get(f"{name}_global_scale")
        forms = {"I32": _PACKED, "I8": _INT, "F8_E4M3": _FLOAT, "U8": _MXFP4 if whole is None else _NVFP4}
        if len(weight.shape) != 2 or weight.dtype not in expected:
            raise weight.error(f"shape {weight.shape} of {weight.dtype} is not of a matrix", SAME_MODEL)
        form, rows = forms[weight.dtype], weight.shape[0]
        scale = part(entries, weight, f"{name}_scale", {_MXFP4: "U8", _NVFP4: "F8_E4M3"}.get(form, "float"))
        others = [scale]
        columns = weight.shape[1] * (2 if weight.dtype == "U8" else 1)
        if form == _PACKED:
            others.append(shape := part(entries, weight, f"{name}_shape", "I64"))
            if shape.shape != (2,):
                raise shape.error(f"shape {shape.shape} is not of two sizes", SAME_MODEL)
            said = shape.rows.read().view("<i8").ravel().tolist()
            if said[0] != rows or not 0 < said[1] <= 8 * columns:
                raise shape.error(f"{said} does not fit {weight.shape} words", SAME_MODEL)
            columns = said[1]
        zero = entries.get(f"{name}_zero_point")
        fits = (
            group
            for group in groups
            if (group.form, group.is_symmetric) == (form, zero is None)
            and group.has_scales(scale.shape, rows, columns)
            and (form != _PACKED or ceil(columns * group.bits / 32) == weight.shape[1])
        )
        if (group := next(fits, None)) is None:
            is_symmetric = "symmetric" if zero is None else "not symmetric"
            what = f"is {form}, {is_symmetric}, {(rows, columns)} with scales {scale.shape}"
            known = "; ".join(map(str, groups)) or "the config, which has no groups"
            raise weight.error(f"{what}, which fits none of: {known:.300}", SAME_MODEL)
        size, block = group.group_size, group.block
        if form == _FLOAT:
            yield fp8_matrix(entries, name, weight, block or ((1, size) if size else None))
        elif form == _MXFP4:
            yield Found(name, mxfp4_tensor(weight, scale), (weight, scale))
        elif form == _NVFP4:
            whole = part(entries, weight, f"{name}_global_scale", "F32")
            yield nvfp4_matrix(name, weight, scale, whole, is_inverse=True)
        else:
            if zero is not None:
                part(entries, weight, zero.name, weight.dtype)
            has_index = form == _PACKED and (group.is_sorted or f"{name}_g_idx" in entries)
            g_idx = part(entries, weight, f"{name}_g_idx", "I32") if has_index else None
            bits = 8 if form == _INT else group.bits
            matrix = IntegerRows("compressed-tensors", bits, size, (rows, columns), weight, scale, zero, g_idx)
            packed = -(-rows * bits // 32), matrix.num_groups
            matrix.check(zero=packed if form == _PACKED else scale.shape)
            yield Found(name, matrix, (*matrix.parts, *others))


def _groups(settings: Config) -> Iterator[_Group]:
    """Yield the settings of the groups. Raise ModelError for what is not supported."""
    whole = one_of(settings, "format", "", (*_READ, _NAIVE, _MIXED))
    sparsity = settings.value("quantization_config.sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        what = f"quantization_config.sparsity_config = {sparsity!r:.80} is not supported"
        raise settings.error(what, "Use a checkpoint whose weights are dense")
    groups = settings.value("quantization_config.config_groups")
    if groups is None and whole == _FLOAT:
        groups = {"0": {"weights": {"type": "float"}}}
    for name, group in groups.items() if isinstance(groups, dict) else [("", groups)]:
        if not isinstance(group, dict) or not isinstance(weights := group.get("weights") or {}, dict):
            at = f"quantization_config.config_groups {name!r:.80}"
            raise settings.error(f"{at} is {group!r:.80}, not an object with weights", FETCH_AGAIN)
        check_unread(Config(settings.path, group, part=f"config_groups.{name:.80}: "), _OF_GROUPS, WITHOUT_IT)
        if not weights:
            continue
        own = Config(
            settings.path, {**weights, "format": group.get("format")}, part=f"config_groups.{name:.80}.weights: "
        )
        kind, bits = own.get("type", str, "int"), own.size("num_bits", 8)
        form = own.get("format", str, f"{kind}-quantized" if whole == _NAIVE else whole)
        form = f"{kind}-quantized" if form == _NAIVE else form
        first, *rest = _READ.get(form, ("",))
        if kind != first or bits not in rest or whole not in (form, _NAIVE, _MIXED):
            what = f"format = {form!r:.80}, type = {kind!r:.80}, num_bits = {bits} is not supported"
            raise own.error(what, f"Use a checkpoint of {', '.join(_READ)}")
        size, block = own.optional("group_size", int), sizes(own, "block_structure")
        if size not in (None, -1) and not 0 < size <= MOST_COLUMNS:
            raise own.error(f"group_size = {size!r:.80} is not from 1 to {MOST_COLUMNS}, -1 or null", FETCH_AGAIN)
        if block and form != _FLOAT:
            raise own.error(f"block_structure = {list(block)} is not supported for {form}", WITHOUT_IT)
        is_sorted = form == _PACKED and weights.get("actorder") in ("group", "dynamic", True)
        yield _Group(form, bits, max(size or 0, 0), own.get("symmetric", bool, True), block, is_sorted)
        check_unread(own, _WITHOUT_EFFECT, WITHOUT_IT)
