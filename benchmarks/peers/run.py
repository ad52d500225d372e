"""Workloads on Foreword and its peers, one after the other, each in its own environment; one table with versions.

    python benchmarks/peers/run.py                            # everything: environments, conversions, runs
    python benchmarks/peers/run.py --only foreword,vllm:w8a8 --workloads W1,W4
    python benchmarks/peers/run.py --table-only               # the table of earlier results
    python benchmarks/peers/run.py --workloads W6,W8          # long prompts: 2,048 and 8,191 tokens
    python benchmarks/peers/run.py --gguf qwen.gguf --workloads W6,W9   # another model, 32,767 tokens

The machine should be otherwise idle. All files are in --peers (default ~/.cache/foreword/peers): environments,
and per model models/NAME/ (conversions) and results/NAME.jsonl (one result per line, appended; the table shows the
best per row and workload). NAME: of the GGUF file. Rows of the file itself have the number format that NAME ends with.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import environments
from table import print_table
from workloads import NAMES

HERE = Path(__file__).resolve().parent
USUAL = "W1,W2,W3,W4,W5,W6,W7"
DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1"
FILE = "file"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. form: the converted model that the engine loads, "" for the GGUF file itself. weights: their
    number format, FILE for that of this file.
    """

    peer: str
    script: str
    environment: str
    weights: str
    form: str = ""


ROWS = (
    *(Row("foreword", "run_foreword.py", "foreword", w) for w in ("auto", "q4", "int8", "int8/int8", "bf16", "fp32")),
    *(Row("foreword", "run_foreword.py", "foreword", f"{w}/preallocated") for w in ("int8/int8", "bf16/bf16")),
    Row("vllm", "run_vllm.py", "vllm", "w8a8", "vllm-w8a8"),
    Row("vllm", "run_vllm.py", "vllm", "bf16", "hf-bf16"),
    Row("vllm", "run_vllm.py", "vllm", "fp32", "hf-fp32"),
    *(Row("openvino", "run_openvino.py", "openvino", w, f"openvino-{w}") for w in ("int8", "int4", "fp32")),
    Row("openvino", "run_openvino.py", "openvino", "bf16", "openvino-fp32"),
    Row("onnxruntime", "run_onnxruntime.py", "onnxruntime", "int4", "onnxruntime-int4"),
    Row("llama_cpp", "run_llama_cpp.py", "llama_cpp", FILE),
    *(Row("llama_cpp", "run_llama_cpp.py", "llama_cpp", w, f"{w}.gguf") for w in ("q8_0", "bf16", "q4_0", "f32")),
    *(
        Row(peer, f"run_{peer}.py", peer, weights, form)
        for peer in ("ik_llama_cpp", "xllamacpp", "mistralrs")
        for weights, form in ((FILE, ""), ("q8_0", "q8_0.gguf"))
    ),
    Row("transformers", "run_transformers.py", "transformers", "bf16", "hf-bf16"),
    Row("transformers", "run_transformers.py", "transformers", "fp32", "hf-fp32"),
    Row("transformers_cb", "run_transformers_cb.py", "transformers", "bf16", "hf-bf16"),
    Row("foreword_transformers", "run_foreword_transformers.py", "transformers", "bf16", "hf-bf16"),
)


def rows_of(name: str) -> list[Row]:
    """Return the rows for a GGUF file of this name. It is not converted to its own number format."""
    found = re.search(r"(?:^|[-._])((?:i?q\d|mxfp4|bf16|f16|f32)\w*)$", name.lower())
    weights = found[1] if found else FILE
    rows = [replace(row, weights=weights) if row.weights == FILE else row for row in ROWS]
    return [row for row in rows if row.form != f"{weights}.gguf"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Workloads on Foreword and its peers; one table.")
    parser.add_argument("--peers", type=Path, default=environments.DEFAULT_DIRECTORY, help="directory of all files")
    parser.add_argument("--gguf", type=Path, help=f"a GGUF file (default: {DEFAULT_MODEL}.gguf, pulled by Foreword)")
    parser.add_argument("--only", default="", help="peers or peer:weights, separated by commas")
    parser.add_argument("--workloads", default=USUAL, help="W8 and W9 are long prompts: 8,191 and 32,767 tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=1800, help="maximum seconds per row")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument(
        "--json", action="store_true", help="print the results of this run as JSON lines, not the table"
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.workloads.split(",")) - set(NAMES)):
        parser.error(f"--workloads: {', '.join(unknown)} not among {', '.join(NAMES)}")
    if args.gguf and not args.table_only and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: there is no such file")
    name = args.gguf.stem if args.gguf else DEFAULT_MODEL
    results = args.peers / "results" / f"{name}.jsonl"
    earlier = results.stat().st_size if results.exists() else 0
    if not args.table_only:
        wanted = set(filter(None, args.only.split(",")))
        possible = rows_of(name)
        rows = [r for r in possible if not wanted or wanted & {r.peer, f"{r.peer}:{r.weights}"}]
        if not rows:
            parser.error(f"--only {args.only}: choose among {', '.join(f'{r.peer}:{r.weights}' for r in possible)}")
        results.parent.mkdir(parents=True, exist_ok=True)
        gguf = args.gguf or _pull(args.peers)
        for row in rows:
            try:
                _run(row, gguf, results, args)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{row.peer} {row.weights}: skipped, {error}", file=sys.stderr)
    if not results.exists():
        sys.exit(f"{results}: no row has a result")
    if args.json:
        print(results.read_bytes()[earlier:].decode(), end="")
    else:
        print_table(results)


def _pull(peers: Path) -> Path:
    python = environments.ensure(peers, "foreword")
    code = "from foreword.models.registry import pull; print(pull('smollm2'))"
    return Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


def _run(row: Row, gguf: Path, results: Path, args: argparse.Namespace) -> None:
    model = _model(row.form, gguf, args.peers)
    python = environments.ensure(args.peers, row.environment)
    print(f"{row.peer} {row.weights}", file=sys.stderr, flush=True)
    command = [
        python,
        HERE / row.script,
        "--model",
        model,
        "--name",
        gguf.stem,
        "--weights",
        row.weights,
        "--out",
        results,
    ]
    command += ["--workloads", args.workloads, "--repeats", args.repeats, "--threads", args.threads]
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if row.peer == "vllm":
        variables |= _vllm_variables(python.parents[1])
    else:
        variables |= {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    subprocess.run(list(map(str, command)), check=True, timeout=args.limit, env={**os.environ, **variables})


def _model(form: str, gguf: Path, peers: Path) -> Path:
    """The file or directory to load, converted if it is missing."""
    path = peers / "models" / gguf.stem / form if form else gguf
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if form.endswith(".gguf"):
        python = environments.ensure(peers, "llama_cpp")
        command = [python, HERE / "convert_gguf.py", gguf, path, form.removesuffix(".gguf")]
    else:
        python = environments.ensure(peers, "convert")
        command = [python, HERE / "convert.py", gguf, path.parent, form]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def _vllm_variables(environment: Path) -> dict[str, str]:
    preload = [str(environment / "lib" / "libiomp5.so")]
    preload += map(str, Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    return {
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


if __name__ == "__main__":
    main()
