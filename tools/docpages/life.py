"""The page of a token's life and its picture: one request, the functions that it passes, and a real step's values."""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from foreword.batch import InputBatch, InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs

PROMPT, BLOCKS, BLOCK_SIZE, SAMPLED = [11, 12, 13], [4, 7], 2, 42
START, END = "<!-- stops -->", "<!-- /stops -->"


class Stop(NamedTuple):
    """A place that a token passes: its title, the file and function, what happens, and the value that leaves it."""

    title: str
    file: str
    function: str
    what: str
    value: str


def decode_step() -> InputBatch:
    """Return the second step of a request: its prompt is computed, its first token was sampled."""
    states = RequestStates(max_num_reqs=2, max_model_len=8, vocab_size=100, kv_groups=[KVGroup(block_size=BLOCK_SIZE)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=8)
    states.add_request(NewRequest("a", prompt_token_ids=PROMPT, block_ids=[BLOCKS]))
    first = prepare_inputs(states, {"a": len(PROMPT)}, buffers)
    states.commit(first, {"a": [SAMPLED]})
    return prepare_inputs(states, {"a": 1}, buffers)


def stops() -> list[Stop]:
    """Return the stops in their order, with the values of `decode_step`."""
    batch = decode_step()
    slot, block = int(batch.slot_mapping[0][0]), BLOCKS[int(batch.positions[0]) // BLOCK_SIZE]
    token, position = int(batch.input_ids[0]), int(batch.positions[0])
    return [
        Stop(
            "The request arrives", "src/foreword/engine/llm.py", "generate",
            "The prompt and the parameters are checked together. Nothing has changed yet.",
            'prompt "…", SamplingParams',
        ),
        Stop(
            "Text becomes token ids", "src/foreword/engine/intake.py", "check",
            "The tokenizer encodes the text; lengths and names are compared with the limits of the engine.",
            f"token ids {PROMPT}",
        ),
        Stop(
            "It waits", "src/foreword/scheduler/waiting.py", "push",
            "The policy gives the request a key. The smallest key is admitted first.",
            'WaitingQueue: request "a"',
        ),
        Stop(
            "It gets a row and blocks", "src/foreword/scheduler/admission.py", "place",
            "The prefix cache is searched, free blocks are taken, and the request enters a row of `RequestStates`.",
            f"row 0, blocks {BLOCKS}",
        ),
        Stop(
            "A step is planned", "src/foreword/scheduler/scheduler.py", "schedule",
            "Every running request gets a number of tokens within `max_num_batched_tokens`. The prompt took "
            f"{len(PROMPT)}; after it, each step takes one.",
            "plan: row 0, 1 token",
        ),
        Stop(
            "The plan becomes tensors", "src/foreword/batch/prepare/prepare.py", "prepare_inputs",
            "A backend writes every tensor of the step into one arena. "
            f"Slot = block · {BLOCK_SIZE} + offset = {block} · {BLOCK_SIZE} + {position % BLOCK_SIZE}.",
            f"id {token}, position {position}, slot {slot}",
        ),
        Stop(
            "The step starts", "src/foreword/engine/pipeline.py", "launch",
            "The batch and what sampling needs go to the executor. This is the seam: any `Executor` fits here.",
            "InputBatch, StepSampling",
        ),
        Stop(
            "The forward pass", "src/foreword/executors/native.py", "_step",
            f"The kernels write the token's key and value into slot {slot}, attend to the "
            f"{int(batch.seq_lens[0])} tokens of the request through its block table, and compute logits.",
            f"logits of batch row {int(batch.logits_indices[0])}",
        ),
        Stop(
            "A token is drawn", "src/foreword/sampling/sampler.py", "sample",
            "Penalties, masks, temperature and filters are applied in a fixed order, then one token is drawn.",
            "Sampled: one token id",
        ),
        Stop(
            "It is committed", "src/foreword/batch/state/request_states.py", "commit",
            "The token joins the request's row. From now on it is known, and not computed.",
            f"{int(batch.seq_lens[0]) + 1} tokens known, {int(batch.seq_lens[0])} computed",
        ),
        Stop(
            "Ids become text", "src/foreword/engine/output_processor.py", "process",
            "The detokenizer adds whole characters; stop strings, stop tokens and the length limit are compared.",
            "RequestOutput",
        ),
        Stop(
            "Again, or the end", "src/foreword/scheduler/scheduler.py", "finish",
            "If nothing stops the request, the next step is planned. Else its row and blocks become free, and "
            "the blocks keep their content for equal prompts until others need the memory.",
            f"blocks {BLOCKS} still cached",
        ),
    ]  # fmt: skip


def page(text: str) -> str:
    """Return the page with its table of stops."""
    lines = ["| | stop | where | what happens | what leaves it |", "|---|---|---|---|---|"]
    lines += [
        f"| {number} | {stop.title} | `{stop.file.removeprefix('src/foreword/')}`, `{stop.function}` | {stop.what} | "
        f"{stop.value} |"
        for number, stop in enumerate(stops(), 1)
    ]
    table = "\n".join([START, *lines, END])
    return re.sub(f"{re.escape(START)}.*?{re.escape(END)}", lambda _: table, text, flags=re.S)


def picture() -> str:
    """Return the stops as an SVG: a path in three rows, read like text."""
    width, height, columns = 228, 92, 4
    rows = -(-len(stops()) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * width + 12} {rows * height + 4}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>The stops of a token, from the request to the text</title>",
        "<style>rect{fill:#f4f6fa;stroke:#4a6fa5}text{fill:#1c2733}.value{font-family:ui-monospace,monospace;"
        "font-size:10.5px;fill:#8a3b00}.file{font-size:10.5px;fill:#4b5a6a}path{stroke:#4a6fa5;fill:none}"
        "@media(prefers-color-scheme:dark){rect{fill:#1f2733}text{fill:#e6edf5}.value{fill:#ffb27a}"
        ".file{fill:#a9b7c6}}</style>",
    ]
    for index, stop in enumerate(stops()):
        x, y = 10 + index % columns * width, 6 + index // columns * height
        lines = (
            ("", f"{index + 1}. {stop.title}"),
            ("file", f"{stop.file.rpartition('/')[2]}: {stop.function}"),
            ("value", stop.value),
        )
        parts.append(f'<rect x="{x}" y="{y}" width="{width - 22}" height="{height - 24}" rx="6"/>')
        parts += [
            f'<text x="{x + 10}" y="{y + 20 + 19 * line}"{kind and f" class={kind!r}"}>{escape(text)}</text>'
            for line, (kind, text) in enumerate(lines)
        ]
        if index + 1 < len(stops()) and (index + 1) % columns:
            parts.append(f'<path d="M{x + width - 22} {y + 34}h18m-6 -5l6 5l-6 5"/>')
        elif index + 1 < len(stops()):
            down = "v12H24v12m-5 -6l5 6l5 -6"
            parts.append(f'<path d="M{x + (width - 22) // 2} {y + height - 24}{down}"/>')
    return "\n".join([*parts, "</svg>", ""])
