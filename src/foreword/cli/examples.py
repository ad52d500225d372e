"""Examples of each command, shown at the end of its help."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ('foreword run "What is the capital of France?"', "foreword chat", "foreword explain"),
    "run": (
        'foreword run "What is the capital of France?"',
        'git diff | foreword run "Write a commit message for this:"',
        'foreword run -m model.gguf --raw "Once upon a time" --max-tokens 50',
        'foreword run "Write a poem about the sea." --temperature 0.7 --json',
        'foreword run -m ./model "What is this?" --image photo.jpg',
    ),
    "chat": (
        "foreword chat",
        'foreword chat --system "Answer in one sentence." --temperature 0.7',
        "foreword chat --load talk.json",
        "foreword chat --continue",
    ),
    "batch": (
        "foreword batch requests.jsonl answers.jsonl",
        "foreword batch requests.jsonl answers.jsonl --retry-errors",
        "foreword batch requests.jsonl - -m qwen2.5-coder-0.5b",
    ),
    "embed": ('foreword embed "A man is eating food."', "foreword embed --dimensions 128 < sentences.txt"),
    "serve": (
        "foreword serve",
        "foreword serve -m model.gguf --port 8080 --speculation ngram",
        "foreword serve --config serve.toml --access-log",
        "foreword serve smollm2 qwen2.5-coder-0.5b",
        "foreword serve --models-dir ./models --load-on-demand --ram-budget 12GiB",
    ),
    "explain": (
        "foreword explain",
        "foreword explain --prompts 3,2,8 --budget 10 --steps 2",
        "foreword explain --token 3",
        "foreword explain --example vllm-ascend",
        "foreword explain --computed 54,145,0,0 --scheduled 1,1,93,75 --block-size 16",
        'foreword explain --model smollm2 "The capital of France is" "Hello"',
    ),
    "tour": ("foreword tour", "foreword tour list", "foreword tour 3 --hint", "foreword tour 3 --check my_answer.py"),
    "simulate": (
        "foreword simulate --trace arrivals.jsonl",
        "foreword simulate --trace arrivals.jsonl --cost cost.json",
        "foreword simulate --trace arrivals.jsonl --policies fcfs,shortest-first",
        "foreword simulate --trace arrivals.jsonl --copies 9 --replicas 16",
    ),
    "calibrate": ("foreword calibrate smollm2 -o cost.json",),
    "conform": ("foreword conform trace.jsonl",),
    "replay": (
        "foreword replay steps.jsonl --backend native",
        "foreword replay steps.jsonl --model smollm2",
        "foreword replay steps.jsonl --model smollm2 --against weight_format=fp32",
    ),
    "shadow": (
        "foreword shadow -- vllm serve MODEL",
        "foreword shadow --check tensors,sample:10 -- vllm serve MODEL",
        "foreword shadow --record steps.jsonl:200MB -- vllm serve MODEL",
    ),
    "migrate": (
        'foreword migrate vllm "vllm serve org/model --max-num-seqs 64"',
        'foreword migrate llama.cpp "llama-server -m model.gguf -c 8192 -np 4"',
        "foreword migrate ollama Modelfile",
    ),
    "inspect": (
        "foreword inspect steps.jsonl.gz -o steps.html",
        "foreword inspect steps.jsonl.gz --perfetto steps.json",
    ),
    "rerun": (
        "foreword rerun steps.jsonl --engine vllm",
        "foreword rerun small.jsonl --engine vllm --as-test > test_small.py",
    ),
    "shrink": (
        "foreword shrink steps.jsonl --tensor slot_mapping -o small.jsonl",
        'foreword shrink steps.jsonl --failing "python run.py {}" -o small.jsonl',
        "foreword shrink steps.jsonl --failing my_engine:fails --as-test",
    ),
    "fuzz": (
        "foreword fuzz http://127.0.0.1:8000",
        "foreword fuzz http://127.0.0.1:8000 --minutes 60 --block-sizes 16",
        "foreword fuzz http://127.0.0.1:8000 --scenarios crossed,turns -o finding.py",
    ),
    "models": ("foreword models list", "foreword models pull smollm2"),
    "models list": ("foreword models list", "foreword models list --json"),
    "models search": ("foreword models search coder", "foreword models search qwen3 gguf --limit 5"),
    "models recommend": ("foreword models recommend",),
    "models pull": ("foreword models pull smollm2",),
    "models rm": ("foreword models rm smollm2",),
    "models prune": ("foreword models prune", "foreword models prune --bytes 10GiB"),
    "models info": ("foreword models info smollm2",),
    "doctor": ("foreword doctor", "foreword doctor --quick"),
    "bench": ("foreword bench host", "foreword bench latency --model smollm2"),
    "bench host": ("foreword bench host --steps 100", "foreword bench host --engine"),
    "bench throughput": ("foreword bench throughput --workloads W2,W3",),
    "bench latency": ("foreword bench latency --kv-format int8",),
    "bench prefill": ("foreword bench prefill --json",),
    "bench startup": ("foreword bench startup",),
}
"""Words of a command → command lines."""


def epilog(words: str) -> str | None:
    """Return the examples of a command as the last part of its help, one per line."""
    lines = EXAMPLES.get(words, ())
    return "\n  ".join(["\b\nExamples:", *lines]) if lines else None
