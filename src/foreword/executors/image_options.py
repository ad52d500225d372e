"""The values of a conversation for the processor of images of a model, in place of those of its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from foreword.errors import ModelError, RequestError
from foreword.media.encoder import PROCESSING
from foreword.models.config import USE_ITS_CONFIG
from foreword.models.families.vision_base import FILTERS, LARGEST_SIDE, MOST_CROPS, PAN_AND_SCAN
from foreword.models.vision_files import ImageProcessing
from foreword.names import advice

EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Bounds of the pixels of an image, and their names in the size of processors that have them."""
_OF_CROPS, _SPLITTING = "pan_and_scan_", "do_image_splitting"


class _Kind(NamedTuple):
    """The values that an option takes. expected: in words."""

    takes: Callable[[object], bool]
    expected: str


def _integer(least: int, most: int) -> _Kind:
    return _Kind(lambda value: type(value) is int and least <= value <= most, f"an integer from {least} to {most}")


def _is_ratio(value: object) -> bool:
    return (type(value) is int and 0 < value < 1 << 62) or (type(value) is float and 0 < value < math.inf)


_SWITCH = _Kind(lambda value: isinstance(value, bool), "true or false")
_RATIO = _Kind(_is_ratio, "a finite number above 0")
OPTIONS: Mapping[str, _Kind | None] = {
    "size": None,
    "max_image_size": None,
    "min_pixels": _integer(1, LARGEST_SIDE**2),
    "max_pixels": _integer(1, LARGEST_SIDE**2),
    "resample": _integer(FILTERS[0], FILTERS[-1]),
    "min_image_tokens": _integer(1, LARGEST_SIDE**2),
    "max_image_tokens": _integer(1, LARGEST_SIDE**2),
    "max_soft_tokens": _integer(1, LARGEST_SIDE**2),
    _SPLITTING: _SWITCH,
    "tile_size": _integer(1, LARGEST_SIDE),
    "min_tiles": _integer(1, MOST_CROPS),
    "max_tiles": _integer(1, MOST_CROPS),
    "max_pixels_tolerance": _RATIO,
    "use_thumbnail": _SWITCH,
    PAN_AND_SCAN: _SWITCH,
    f"{_OF_CROPS}min_crop_size": _integer(1, LARGEST_SIDE),
    f"{_OF_CROPS}max_num_crops": _integer(1, MOST_CROPS),
    f"{_OF_CROPS}min_ratio_to_activate": _RATIO,
}
"""The keys of a preprocessor_config.json on which the size and the number of tiles depend, each with the values that
are followed. None: a size, which has the form of that of the configuration.
"""
_SWITCHED: Mapping[str, tuple[str, frozenset[str]]] = {
    PAN_AND_SCAN: ("pan and scan", frozenset(name for name in OPTIONS if name.startswith(_OF_CROPS))),
    _SPLITTING: ("tiles", frozenset({"tile_size", "min_tiles", "max_tiles", "max_pixels_tolerance", "use_thumbnail"})),
}
"""What a switch turns on, and the options without effect if it is off."""


def check_options(
    values: Mapping[str, object], configured: Mapping[str, object], family: ImageProcessing | None
) -> None:
    """Raise RequestError for values that the model does not follow.

    configured: the options that the model has, with the values of its configuration. family: computes what the values
    give together; without one, only the bounds of pixels are compared.
    """
    for name, value in values.items():
        if not isinstance(name, str):
            raise RequestError(None, PROCESSING, values, f"the name {name!r:.80} is not a text", "Give names as texts.")
        if name not in configured:
            fix = advice(name, configured, "Leave it out.")
            raise RequestError(None, f"{PROCESSING}.{name}", value, "is not a value of the model's processor", fix)
        kind = OPTIONS[name] or _size(configured[name], "min_pixels" in configured)
        if not kind.takes(value):
            reason = f"expected {kind.expected}"
            raise RequestError(None, f"{PROCESSING}.{name}", value, reason, "Give one, or leave it out.")
    for switch, (what, names) in _SWITCHED.items():
        idle = next((name for name in values if name in names), None)
        if idle is not None and not values.get(switch, configured.get(switch)):
            reason, fix = f"has no effect without {what}", f"Give {switch} = true, too, or leave it out."
            raise RequestError(None, f"{PROCESSING}.{idle}", values[idle], reason, fix)
    if values and (contradiction := _contradiction(values, configured, family)):
        what = f"the model does not follow it ({contradiction})"
        raise RequestError(None, PROCESSING, values, what, "Give other values, or leave it out.")


def _size(configured: object, has_areas: bool) -> _Kind:
    """Return the sizes that have the form of that of the configuration. has_areas: its edges are pixels of an area.

    A shortest edge alone does not bound the other one: it is at most that of the configuration.
    """
    if type(configured) is int:
        return _integer(1, LARGEST_SIDE)
    given = configured if isinstance(configured, Mapping) else {}
    edges = {name: most for name, most in given.items() if most is not None}
    if not edges:
        return _Kind(lambda value: False, "no value: the configuration of the model has none")
    most = LARGEST_SIDE**2 if has_areas else LARGEST_SIDE
    if edges.keys() == {"shortest_edge"}:
        most = min(most, edges["shortest_edge"])
    edge = _integer(1, most)

    def takes(value: object) -> bool:
        return isinstance(value, Mapping) and value.keys() == edges.keys() and all(map(edge.takes, value.values()))

    return _Kind(takes, f"a mapping with {' and '.join(sorted(edges))}, each {edge.expected}")


def _contradiction(
    values: Mapping[str, object], configured: Mapping[str, object], family: ImageProcessing | None
) -> str:
    """Return what is wrong with values together, empty if nothing is."""
    if family is not None:
        try:
            family.spec(values)
        except ModelError as error:
            return str(error).removesuffix(f". {USE_ITS_CONFIG}")
        return ""
    sizes = [size for size in (configured.get("size"), values.get("size")) if isinstance(size, Mapping)]
    bounds = {name: most for size in sizes for name, most in size.items()}
    bounds |= {edge: values[name] for name, edge in EDGES.items() if name in values}
    least, most = (bounds.get(edge) for edge in EDGES.values())
    if "min_pixels" in configured and least is not None and most is not None and least > most:
        return f"images have at least {least} and at most {most} pixels"
    return ""
