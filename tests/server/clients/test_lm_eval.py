"""lm-eval's `local-completions`: generation, and scores of continuations by echo and log-probabilities."""

import json
import math
import subprocess
import sys

import pytest

from foreword import LLM, SamplingParams

TASKS = {
    "choose": """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: "DATA"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "write": """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: "DATA"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{greedy}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 7}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
QUESTIONS = ["Once upon", "a", "The é"]
CHOICES = ["ab", "é", "moo", "oooa"]


@pytest.fixture(scope="module")
def llm(talker):
    return LLM(str(talker), executor="numpy", max_model_len=1024)


def score(llm: LLM, question: str, choice: str) -> float:
    """Sum of the log-probabilities of the choice's tokens, each from a prompt of its own."""
    tokens, wanted = llm.tokenizer.encode(question), llm.tokenizer.encode(choice)
    total = 0.0
    for token in wanted:
        (output,) = llm.generate([tokens], SamplingParams(max_tokens=1, logprobs=-1), progress=False)
        total += output.outputs[0].logprobs[0][token].logprob
        tokens = [*tokens, token]
    return total


def test_scores_and_generations_are_those_of_the_model(server, llm, tmp_path):
    pytest.importorskip("lm_eval")
    greedy = llm.generate(QUESTIONS, SamplingParams(temperature=0, max_tokens=7, stop="zz"), progress=False)
    rows = [
        {"question": question, "choices": CHOICES, "greedy": output.outputs[0].text}
        for question, output in zip(QUESTIONS, greedy, strict=True)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    settings = {"model": "talker", "base_url": f"{server.url}/v1/completions", "num_concurrent": "4"}
    settings |= {"tokenizer_backend": "remote", "auth_token": "secret", "max_length": "512"}
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "choose,write"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in settings.items())),
        *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"),
    ]
    environment = {"OPENAI_API_KEY": "secret", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name in TASKS
        for path in (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
    }
    for sample in samples["choose"]:
        for choice, ((found, _is_greedy),) in zip(CHOICES, sample["resps"], strict=True):
            expected = score(llm, sample["doc"]["question"], choice)
            assert math.isclose(float(found), expected, rel_tol=1e-4, abs_tol=1e-4), (sample["doc"], choice)
    assert [sample["exact_match"] for sample in samples["write"]] == [1.0] * len(QUESTIONS)
