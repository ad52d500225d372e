"""The tables of docs/models.md that follow from the registry, the families and their keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from docpages.marks import with_table
from foreword.models import registry
from foreword.models.families import ENCODER_FAMILIES, FAMILIES
from foreword.models.families.base import Family
from foreword.models.families.encoder_base import EncoderFamily
from foreword.models.families.gguf_encoders import GGUF_ENCODER_TYPES
from foreword.models.keys import WITHOUT_EFFECT
from foreword.models.quantized.checkpoint import REFUSED
from foreword.models.recommended import KV_BYTES, RECOMMENDED

ROOT = Path(__file__).resolve().parents[2]
ALL: Mapping[str, Family | EncoderFamily] = {**FAMILIES, **ENCODER_FAMILIES}


def with_tables(page: str) -> str:
    """Return the page with its tables."""
    of_others = ("recommended", recommended())
    for name, rows in (
        ("known", known()),
        of_others,
        ("families", families()),
        ("keys", keys()),
        ("ignored", ignored()),
        ("refused", refused()),
    ):
        page = with_table(page, name, next(rows), rows)
    return page


def refused() -> Iterator[tuple[str, ...]]:
    yield ("`quant_method`", "why it is refused")
    for method, reason in sorted(REFUSED.items()):
        yield f"`{method}`", reason


def known() -> Iterator[tuple[str, ...]]:
    yield ("name", "model", "licence", "package on the index")
    for model in registry.KNOWN.values():
        first, last = (part.wheel for part in (model.parts[0], model.parts[-1]))
        more = "" if first == last else f" … `{last.package.removeprefix(first.package[:-1])}`"
        terms = ", must be accepted before the first pull" if model.terms else ""
        size = f"{model.description}, {model.size / 1e6:,.0f} MB" + "; the default" * (model is registry.DEFAULT)
        size += f"; {model.remark}" if model.remark else ""
        yield f"`{model.name}`", size, model.license + terms, f"`{first.package}`{more} {first.version}"


def recommended() -> Iterator[tuple[str, ...]]:
    yield (
        "id for `-m`",
        "size",
        f"memory with {KV_BYTES / 2**30:.0f} GiB beside the weights",
        "licence",
        "good at",
        "confirmed",
    )
    for model in RECOMMENDED:
        sizes = f"{model.size / 1e9:.1f} GB", f"{model.memory / 1e9:.1f} GB"
        yield f"`{model.model}`", *sizes, model.license, model.good_at, model.confirmed or "–"


def families() -> Iterator[tuple[str, ...]]:
    """Return a row per family. The last column has the tiny models whose results are compared with transformers'."""
    recorded = [
        values["config"]["model_type"]
        for name in ("tiny.json", "pooling.json")
        for values in json.loads((ROOT / "tests" / "data" / "models" / name).read_text())["models"].values()
    ]
    yield ("family", "in a directory (`model_type`)", "in GGUF", "models compared with transformers")
    titles = dict.fromkeys(family.title for family in ALL.values())
    for title in titles:
        types = [model_type for model_type, family in ALL.items() if family.title == title]
        of_title = (family for family in FAMILIES.values() if family.title == title)
        gguf = [name for family in of_title if family.gguf for name in (family.gguf, *family.more_gguf)]
        gguf += [name for name, of in GGUF_ENCODER_TYPES.items() if set(of) & set(types)]
        in_gguf = code(gguf) or "–"
        yield title, code(types), in_gguf, str(sum(map(recorded.count, types)))


def keys() -> Iterator[tuple[str, ...]]:
    """The keys that are computed for some values alone, each with another name that it has in GGUF files."""
    families_of: dict[tuple[str, str], list[str]] = {}
    for model_type, family in ALL.items():
        for key in family.keys.values():
            if key.values and key.name != "tie_word_embeddings":
                name = f"`{key.label}`" + (f" (`*.{key.gguf}`)" if key.gguf and f"*.{key.gguf}" != key.name else "")
                values = code(json.dumps(value).strip('"') for value in key.values if value is not None)
                families_of.setdefault((name, values or "no value"), []).append(model_type)
    names: dict[tuple[str, str], list[str]] = {}
    for (name, values), types in families_of.items():
        names.setdefault((values, whose(types)), []).append(name)
    yield ("keys", "computed for", "families")
    yield from ((", ".join(several), *row) for row, several in names.items())


def whose(types: list[str]) -> str:
    """Return the families with these types in the shortest form."""
    forms = [code(types)]
    for name, group in (("decoders", FAMILIES), ("encoders", ENCODER_FAMILIES), ("all", ALL)):
        if set(types) <= group.keys():
            others = [model_type for model_type in group if model_type not in types]
            forms.append(name + (" but " + code(others) if others else ""))
    return min(forms, key=len)


def ignored() -> Iterator[tuple[str, ...]]:
    yield ("without effect where the family does not read them", "keys")
    for reason in dict.fromkeys(WITHOUT_EFFECT.values()):
        yield reason, code(name for name, other in WITHOUT_EFFECT.items() if other == reason)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)
