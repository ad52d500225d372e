"""Write small GGUF files part by part, so that tests can cut and damage them at known offsets."""

import struct
from pathlib import Path

import numpy as np

KINDS = {"u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
         "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}  # fmt: skip


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, item):
    """``kind`` is a name in KINDS, "str", or "[...]" for an array of one of them."""
    if kind.startswith("["):
        inner = kind[1:-1]
        number = 8 if inner == "str" else KINDS[inner][0]
        body = b"".join(string(x) if inner == "str" else struct.pack(KINDS[inner][1], x) for x in item)
        return struct.pack("<IIQ", 9, number, len(item)) + body
    if kind == "str":
        return struct.pack("<I", 8) + string(item)
    number, code = KINDS[kind]
    return struct.pack("<I", number) + struct.pack(code, item)


def parts(metadata, tensors, version=3, alignment=32):
    """The file as (field, bytes) pairs. metadata: {key: (kind, item)}; tensors: {name: (quant, shape, uint8 bytes)}."""
    yield "magic", b"GGUF"
    yield "version", struct.pack("<I", version)
    yield "num_tensors", struct.pack("<Q", len(tensors))
    yield "num_metadata", struct.pack("<Q", len(metadata))
    for key, (kind, item) in metadata.items():
        yield key, string(key)
        yield key, value(kind, item)
    offset = 0
    for name, (quant, shape, data) in tensors.items():
        yield name, string(name)
        yield name, struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        yield name, struct.pack("<IQ", quant.ggml_type, offset)
        offset += -(-data.size // alignment) * alignment
    yield "padding", b""  # filled by write()
    for name, (_, _, data) in tensors.items():
        yield name, data.tobytes() + bytes(-data.size % alignment)


def assemble(metadata, tensors, version=3, alignment=32):
    """The file's bytes, and where each part of its header ends."""
    out, ends = b"", []
    for field, data in parts(metadata, tensors, version, alignment):
        out += data if field != "padding" else bytes(-len(out) % alignment)
        ends.append(len(out))
    return out, ends


def write(path: Path, metadata, tensors, **options):
    path.write_bytes(assemble(metadata, tensors, **options)[0])
    return path


def f32(array):
    return np.ascontiguousarray(array, "<f4").view(np.uint8)
