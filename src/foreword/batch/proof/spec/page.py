"""Render the specification as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from foreword.batch.proof.spec.tensor import SYMBOLS, Level, TensorSpec

_HEADINGS = {
    Level.SYSTEM: ("System level", "One row per request in `RequestStates`, as long as the engine lives."),
    Level.STEP: ("Step level", "The scalars of an `InputBatch`."),
    Level.REQUEST: ("Request level", "One entry per request of the step, in batch order."),
    Level.TOKEN: ("Token level", "One entry per scheduled token, request by request."),
    Level.LOGIT: ("Logit level", "One entry per row of logits, or per draft."),
}


_PADDED = (("Tp",), ("Bp",), ("Bp+1",))
_PADDING = (
    "A step can be padded to Tp tokens and Bp requests, for graphs that were captured with these sizes. The table has",
    "the values of the entries after its T tokens and B requests. A `GraphPromise` has the largest lengths of a graph.",
    "`graph_inputs` refuses a step that exceeds them, and returns the promised `max_query_len` and `max_seq_len`. With",
    '`padding_requests="tokens"` the padding tokens belong to the padding requests:',
    "`query_start_loc[B + i] = min(T + i · max_query_len, Tp)`.",
)


def render(tensors: Iterable[TensorSpec]) -> str:
    """Return the page in Markdown."""
    lines = [
        "# Every tensor of a step",
        "",
        "`make pages` writes this page from the specification that also checks batches (`foreword.batch.validate`).",
        "",
        "| symbol | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in SYMBOLS.items()),
        "",
        "The first line of an entry has the shape and type of the tensor, the expression that reads it, the range of",
        "its values (both ends included), and the padding value. In expressions, `batch` is what `prepare_inputs`",
        "returned, `states` are its `RequestStates`, and `g` is the number of a KV group. The second line says what",
        "the tensor means, and which code writes and reads it. The lines with a dash define its values.",
        "",
        "An axis `Tp` or `Bp` begins with `T` or `B` entries for the tokens or requests of the step; all entries after",
        "them have the padding value. At system level, rows without a request have the padding value.",
        "",
        "To find a tensor in the code, start with `src/foreword/batch/prepare/backends/loops.py`, which computes each",
        "tensor of a step in plain loops. `src/foreword/batch/step/layout.py` lists their shapes and types.",
    ]
    tensors = tuple(tensors)
    for level, (title, lead) in _HEADINGS.items():
        lines += ["", f"## {title}", "", lead, ""]
        for spec in tensors:
            if spec.level is level:
                lines += _entry(spec)
    lines += ["## Padding", "", *_PADDING, "", "| tensor | entries of padding |", "|---|---|"]
    lines += [f"| `{spec.name}` | {_padding(spec)} |" for spec in tensors if spec.shape[:1] in _PADDED]
    return "\n".join(lines) + "\n"


def _padding(spec: TensorSpec) -> str:
    return {"T": "T: an empty request", "null": "the null block"}.get(str(spec.padding), str(spec.padding))


def _entry(spec: TensorSpec) -> list[str]:
    facts = [f"[{', '.join(spec.shape)}] {spec.dtype}" if spec.shape else "scalar", f"`{spec.expression}`"]
    if spec.per_group:
        facts.append("one per KV group")
    if spec.optional:
        facts.append(f"with {spec.optional}")
    if spec.range is not None:
        low, high = spec.range
        facts.append(f"{low} … {'' if high is None else high}".rstrip())
    if spec.padding is not None:
        facts.append(f"padding {spec.padding}")
    return [
        f"**`{spec.name}`** {' · '.join(facts)}  ",
        f"{spec.definition[0].upper()}{spec.definition[1:]}. *Written by:* {spec.producer}. *Read by:* "
        f"{spec.consumers}.",
        *(f"- `{relation.formula}`" for relation in spec.relations),
        "",
    ]
