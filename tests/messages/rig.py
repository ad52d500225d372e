"""Messages written as models write them, and texts cut into pieces."""

import json

from hypothesis import strategies as st

from foreword.messages import FORMATS, MessageParser
from foreword.messages.message import MessageBuilder

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
WORDS = st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        "</think>",
        "<tool",
        "{",
        "}",
        '"',
        "\\",
        "[",
        "é🙂",
        "a b",
        "\n",
        '<|"|',
        "</s>",
        "",
    ]
)
TEXTS = st.lists(WORDS, max_size=5).map("".join)
ARGUMENTS = st.dictionaries(
    NAMES,
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(NAMES, v, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
PROSE = st.text("ab .,é🙂<", max_size=12).map(str.strip).map(lambda text: text + "." if text else "")
CUTS = st.sets(st.integers(0, 200))


def quoted(value, quote):
    """A value in the notation of Gemma's calls, with this mark around strings."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quoted(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def hermes(calls):
    objects = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def smollm2(calls):
    return f"<tool_call>{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}</tool_call>"


def llama3(calls):
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(calls):
    texts = (f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in calls)
    return f"[{', '.join(texts)}]"


def gemma4(calls):
    return "".join(
        f"<|tool_call>call:{name}{quoted(arguments, chr(60) + '|' + chr(34) + '|>')}<tool_call|>"
        for name, arguments in calls
    )


def functiongemma(calls):
    return "".join(
        f"<start_function_call>call:{name}{quoted(arguments, '<escape>')}<end_function_call>"
        for name, arguments in calls
    )


def harmony(calls):
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(
        f"{head}{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>" for name, arguments in calls
    )


def lfm2(calls):
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def mistral3(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def mistral(calls):
    return f"[TOOL_CALLS]{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def granite3(calls):
    return f"<|tool_call|>{json.dumps([{'name': name, 'arguments': arguments} for name, arguments in calls])}"


def command(calls):
    listed = [{"tool_call_id": str(i), "tool_name": call[0], "parameters": call[1]} for i, call in enumerate(calls)]
    lines = ",\n    ".join(map(json.dumps, listed))
    return f"<|START_ACTION|>[\n    {lines}\n]<|END_ACTION|>"


def apertus(calls):
    return f"<|tools_prefix|>{json.dumps([{name: arguments} for name, arguments in calls])}<|tools_suffix|>"


def phi4(calls):
    return f"{granite3(calls)}<|/tool_call|>"


def nemotron2(calls):
    return f"<TOOLCALL>{granite3(calls).removeprefix('<|tool_call|>')}</TOOLCALL>"


def olmo3(calls):
    texts = (f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in a.items())})" for name, a in calls)
    return f"<function_calls>{chr(10).join(texts)}</function_calls>"


def deepseek(calls):
    texts = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(texts)}<｜tool▁calls▁end｜>"


def deepseek31(calls):
    texts = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def kimi_k2(calls):
    texts = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def minimax_m1(calls):
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(["<tool_calls>", *texts, "</tool_calls>"])


def apriel(calls):
    return f"<tool_calls>{granite3(calls).removeprefix('<|tool_call|>')}</tool_calls>"


def internlm2(calls):
    texts = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "".join(f"<|action_start|><|plugin|>\n{text}<|action_end|>" for text in texts)


def gigachat31(calls):
    return "".join(
        f"<|function_call|>{json.dumps({'name': name, 'arguments': arguments})}" for name, arguments in calls
    )


def minicpm3(calls):
    texts = (f"{name}({','.join(f'{key}={json.dumps(value)}' for key, value in a.items())})" for name, a in calls)
    return "\n".join(["<|tool_call_start|>", "```python", *texts, "```", "<|tool_call_end|>"])


WRITERS = {
    "harmony": harmony,
    "hermes": hermes,
    "smollm2": smollm2,
    "llama3": llama3,
    "pythonic": pythonic,
    "gemma4": gemma4,
    "functiongemma": functiongemma,
    "lfm2": lfm2,
    "mistral3": mistral3,
    "mistral": mistral,
    "granite3": granite3,
    "command": command,
    "apertus": apertus,
    "phi4": phi4,
    "nemotron2": nemotron2,
    "olmo3": olmo3,
    "deepseek": deepseek,
    "deepseek31": deepseek31,
    "kimi_k2": kimi_k2,
    "minimax_m1": minimax_m1,
    "apriel": apriel,
    "hunyuan": apriel,
    "ernie45": hermes,
    "internlm2": internlm2,
    "gigachat31": gigachat31,
    "minicpm3": minicpm3,
}
THINKS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>"),
    "hermes": ("<think>\n", "\n</think>\n\n"),
    "smollm2": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "lfm2": ("<think>", "</think>"),
    "mistral3": ("[THINK]", "[/THINK]"),
    "granite3": ("<think>", "</think>"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "hunyuan": ("<think>\n", "\n</think>\n"),
    "apriel": ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
    "minicpm3": ("<|thought_start|>\n", "\n<|thought_end|>\n"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    **dict.fromkeys(
        ("phi4", "nemotron2", "olmo3", "deepseek", "deepseek31", "kimi_k2", "minimax_m1"),
        ("<think>\n", "\n</think>\n\n"),
    ),
}


def format_of(writer):
    return FORMATS["llama3" if writer == "pythonic" else writer]


def pieces(text, cuts):
    ends = sorted({*(cut for cut in cuts if 0 < cut < len(text)), len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def in_pieces(text, cuts, format, **options):
    """The message of a text that arrives in pieces, which its events have to add up to."""
    parser, builder = MessageParser(format, call_id="c", **options), MessageBuilder()
    for piece in pieces(text, cuts):
        builder.add(parser.push(piece))
    builder.add(parser.finish())
    assert builder.message == parser.message
    return parser.message
