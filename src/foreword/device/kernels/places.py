"""The places of what `foreword.device.layout` describes, for kernels: entries by name, and the parts of a packet.

Triton reads constants of a kernel's own module alone, so a kernel imports each place by name: ``PACKET_NUM_REQS`` is
the place of "num_reqs" in a packet's header, ``GROUP_WIDTH`` of "width" in the record of a KV group, ``ROW_SEED`` of
"seed" in the record of a row.
"""

import triton
import triton.language as tl

from foreword.device import layout

HEADER_SIZE = tl.constexpr(layout.HEADER_SIZE)
GROUP_SIZE = tl.constexpr(layout.GROUP_SIZE)
_NUM_TOKENS = tl.constexpr(layout.HEADER.index("num_tokens"))
_NUM_REQS_PADDED = tl.constexpr(layout.HEADER.index("num_reqs_padded"))
_TABLES = {"PACKET": layout.HEADER, "GROUP": layout.GROUP, "ROW": layout.RECORD}


def __getattr__(name: str) -> tl.constexpr:
    """Return the place of an entry; AttributeError for a name that its table does not have."""
    table, _, entry = name.partition("_")
    if entry.lower() not in _TABLES.get(table, ()):
        raise AttributeError(f"{name} is not an entry of foreword.device.layout")
    return tl.constexpr(_TABLES[table].index(entry.lower()))


@triton.jit
def plan_of(packet):
    """Return the parts of a packet's plan: rows [Bp], query_start [Bp + 1], cu_drafts [Bp + 1], owner [T], draft_ids
    [D].
    """
    reqs = tl.load(packet + _NUM_REQS_PADDED)
    rows = packet + HEADER_SIZE
    query_start = rows + reqs
    cu_drafts = query_start + reqs + 1
    owner = cu_drafts + reqs + 1
    return rows, query_start, cu_drafts, owner, owner + tl.load(packet + _NUM_TOKENS)
