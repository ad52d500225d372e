"""`foreword migrate` keeps what has a counterpart, and names the rest."""

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.batch import SamplingParams
from foreword.cli.app import app, option_names, real_command
from foreword.cli.elsewhere import TABLES, options_of
from foreword.cli.migrate import MODEL, PARTS
from foreword.engine.options import split_options
from foreword.executors.kinds import NATIVE, kind_of
from foreword.names import OTHERS, plain_name
from foreword.settings import settings_of


def migrated(*words, text=None):
    done = CliRunner().invoke(app, ["migrate", *words, "--json"], input=text, catch_exceptions=False)
    result = json.loads(done.stdout)
    return done.exit_code, result["command"], {row["given"]: row for row in result["options"]}


def test_options_of_vllm_become_those_of_serve():
    status, command, rows = migrated(
        "vllm", "vllm serve org/model --max-num-seqs 64 --no-enable-prefix-caching --port=8001 --seed 7 --api-key k"
    )
    assert status == 0
    assert command[:3] == ["foreword", "serve", "org/model"]
    assert " ".join(command[3:]) == "--max-num-seqs 64 --no-prefix-caching --port 8001 --seed 7 --api-key k"
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("option", "remark"),
    [
        ("--gpu-memory-utilization 0.9", "Give --kv-cache-bytes, a number of bytes, not a share."),
        ("--temperature 0.5", "A parameter of each request: temperature."),
        ("--nonsense 3", "Nothing here corresponds to it."),
        ("--max-num-seqz 3", "Did you mean '--max-num-seqs'?"),
        ("--port 99999", "port=99999: must be from 0 to 65535"),
        ("--tool-call-parser hermes", "found in the chat template"),
    ],
)
def test_what_has_no_counterpart_is_left_out_with_the_reason(option, remark):
    status, command, rows = migrated("vllm", f"org/model {option} --max-model-len 32")
    assert status == 1
    assert command == ["foreword", "serve", "org/model", "--max-model-len", "32"]
    assert remark in rows[option]["remark"]


def test_short_options_of_llama_cpp_are_known():
    _, command, rows = migrated("llama.cpp", "llama-server -m model.gguf -c 8192 -np 4 -ngl 99 -fa -t 8")
    assert " ".join(command) == "foreword serve model.gguf --max-model-len 8192 --max-num-seqs 4 --num-threads 8"
    assert "one device" in rows["-ngl 99"]["remark"]
    assert "leave it out" in rows["-fa"]["remark"]


RECORDED = Path(__file__).parents[1] / "data" / "other_servers"
WORDS = {"0": (), "1": ("3",), "?": ("on",), "+": ("1", "2")}
NO_ANSWER = ("Nothing here corresponds", "Did you mean")


def recorded(engine):
    """The names of each option of a server as it prints them, with the number of words that follow."""
    lines = (RECORDED / f"{engine}.txt").read_text().splitlines()[1:]
    return [(name, line[0]) for line in lines for name in line[2:].split()]


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_each_option_of_another_server_has_a_counterpart_or_a_reason(engine):
    given = [(name, words) for name, words in recorded(engine) if plain_name(name) not in MODEL and name != "-sc"
             and plain_name(name) not in PARTS and name != "-hfr"]  # fmt: skip
    line = " ".join(word for name, words in given for word in (name, *WORDS[words]))
    _, _, rows = migrated(engine, f"a {line}")
    texts = [f"{name} {word}" for name, words in given for word in WORDS[words]]
    assert set(rows) == {"model a", *texts, *(name for name, words in given if words == "0")}
    assert not [row for row in rows.values() if row["remark"].startswith(NO_ANSWER)]
    assert all(row["here"] or row["remark"] for row in rows.values())


@pytest.mark.parametrize("engine", TABLES)
def test_the_table_of_a_server_has_each_name_once_and_names_what_exists_here(engine):
    names = [name for group in TABLES[engine] for name in group.names.split()]
    assert len(names) == len(set(names))
    here = {
        *option_names(real_command("serve")),
        *(one.name for one in fields(SamplingParams)),
        *PARTS,
        *MODEL,
        *OTHERS,
    }
    for name, option in options_of(engine).items():
        wanted = option.here or plain_name(option.names)
        assert option.remark or name in here or wanted in here, name


@pytest.mark.parametrize(
    ("engine", "given", "here"),
    [
        ("vllm", "--max-model-len 32k --max_num_seqs 4", "--max-model-len 32000 --max-num-seqs 4"),
        ("vllm", "--max-num-batched-tokens=8K --kv-cache-memory-bytes 1.5G",
         "--max-num-batched-tokens 8192 --kv-cache-bytes 1610612736"),
        ("vllm", "--kv-offloading-size 4 --mm-processor-cache-gb 1",
         "--host-cache-bytes 4GiB --media-cache-bytes 1GiB"),
        ("vllm", """--allowed-origins '["http://x", "http://y"]' --api-key a b""",
         "--cors-origin http://x --cors-origin http://y --api-key a --api-key b"),
        ("vllm", "--generation-config vllm --spec-method ngram --spec-tokens 3",
         "--generation-config ignore --speculation ngram --speculation-num-tokens 3"),
        ("vllm", """--kv-events-config '{"endpoint": "tcp://*:7"}' --limit-mm-per-prompt.image 2""",
         "--kv-events 'tcp://*:7' --max-images 2"),
        ("vllm", "--no-async-scheduling --no-enable-log-requests", "--no-async-scheduling --no-access-log"),
        ("llama.cpp", "-a x,y --api-key k,l -s 7", "--served-model-name x --served-model-name y --api-key k "
         "--api-key l --seed 7"),
        ("llama.cpp", "-cram 512 -ctk q8_0 --spec-type draft-mtp", "--host-cache-bytes 512MiB --kv-format int8 "
         "--speculation head"),
        ("llama.cpp", "--lora x,y --no-cache-prompt", "--adapter adapter=x --adapter adapter2=y --no-prefix-caching"),
    ],
)  # fmt: skip
def test_values_are_written_as_they_are_here(engine, given, here):
    status, command, _ = migrated(engine, f"a {given}")
    assert (status, shlex.join(command)) == (0, f"foreword serve a {here}")


def test_the_number_of_tokens_of_an_answer_is_not_the_number_of_answers():
    _, _, rows = migrated("llama.cpp", "llama-server -m a -n 3")
    assert rows["-n 3"]["remark"] == "A parameter of each request: max_tokens."


def test_keys_and_levels_of_an_option_are_known_with_it():
    _, command, rows = migrated(
        "vllm", "vllm serve -O3 a --compilation-config.mode 3 -sc.method ngram --hf_overrides.x y"
    )
    assert command == ["foreword", "serve", "a", "--speculation", "ngram"]
    assert list(rows) == ["-O 3", "model a", "--compilation-config.mode 3", "-sc.method ngram", "--hf_overrides.x y"]
    assert not [row for row in rows.values() if row["remark"].startswith(NO_ANSWER)]


def test_a_second_model_is_left_out():
    status, command, rows = migrated("ollama", "-", text="FROM a\nFROM ./b.gguf\n")
    assert (status, command) == (1, ["foreword", "serve", "a"])
    assert rows["from ./b.gguf"]["remark"] == "a is the model."


def test_each_instruction_and_parameter_of_a_modelfile_has_a_counterpart_or_a_reason():
    names = ("license", "template", "system", "adapter", "draft", "renderer", "parser", "requires")
    parameters = (
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict", "num_keep",
        "seed", "num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "temperature", "repeat_penalty",
        "presence_penalty", "frequency_penalty", "stop", "penalize_newline", "low_vram", "f16_kv", "logits_all",
        "vocab_only", "use_mlock", "mirostat", "mirostat_tau", "mirostat_eta",
    )  # fmt: skip
    lines = [*(f"{name.upper()} x" for name in names), *(f"PARAMETER {name} 3" for name in parameters)]
    _, _, rows = migrated("ollama", "-", text="\n".join(["FROM a", *lines, "MESSAGE user hi"]))
    assert len(rows) == len(lines) + 2
    assert not [row for row in rows.values() if row["remark"].startswith(NO_ANSWER)]
    assert all(row["here"] or row["remark"] for row in rows.values())


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('SYSTEM """a\nPARAMETER num_ctx 9\n"""', "system a\\nPARAMETER num_ctx 9\\n"),
        ('SYSTEM "a\nFROM c"', "system a\\nFROM c"),
        ('PARAMETER stop """\n\n"""', "stop \\n\\n"),
        ('MESSAGE user """a\nb"""', "message user a\\nb"),
        ('message user a "b" c', 'message user a "b" c'),
        ("# SYSTEM x\n  system  y  ", "system y"),
    ],
)
def test_values_in_quotes_go_over_lines(text, given):
    _, command, rows = migrated("ollama", "-", text=f"FROM a\n{text}\nPARAMETER num_ctx 64\n")
    assert command == ["foreword", "serve", "a", "--max-model-len", "64"]
    assert list(rows) == ["from a", given, "num_ctx 64"]


@pytest.mark.parametrize(
    ("engine", "given", "here", "variables"),
    [
        ("llama.cpp", "./llama-server -m x.gguf -c 64", "x.gguf --max-model-len 64", {}),
        ("llama.cpp", "build/bin/llama-server.exe -m x.gguf", "x.gguf", {}),
        ("llama.cpp", "llama serve -m x.gguf", "x.gguf", {}),
        ("llama.cpp", "LLAMA_ARG_PORT=1 llama-server -m x.gguf", "x.gguf", {"LLAMA_ARG_PORT=1": "An option of"}),
        (
            "llama.cpp",
            "LLAMA_API_KEY=k llama-server -m x.gguf",
            "x.gguf",
            {"LLAMA_API_KEY=k": "FOREWORD_SERVE_API_KEY"},
        ),
        ("vllm", "VLLM_API_KEY=k vllm serve m", "m", {"VLLM_API_KEY=k": "FOREWORD_SERVE_API_KEY"}),
        ("vllm", "VLLM_USE_V1=1 vllm serve m", "m", {"VLLM_USE_V1=1": "No variable"}),
        ("vllm", "HF_HOME=/h sudo env A= vllm serve m", "m", {"HF_HOME=/h": "read here too", "A=": "No variable"}),
        ("vllm", "uv run vllm serve m", "m", {}),
        ("vllm", "poetry run nohup vllm serve \\\n m --port 1", "m --port 1", {}),
        ("vllm", "exec /usr/bin/python3.11 -m vllm.entrypoints.openai.api_server --model m", "m", {}),
    ],
)
def test_the_program_and_the_words_before_it_are_not_the_model(engine, given, here, variables):
    status, command, rows = migrated(engine, given)
    assert (status, " ".join(command)) == (1 if variables else 0, f"foreword serve {here}")
    for text, remark in variables.items():
        assert remark in rows[text]["remark"]


@pytest.mark.parametrize(
    ("engine", "given", "named"),
    [
        ("vllm", "docker run --gpus all vllm/vllm-openai --model m", "'docker' cannot be followed"),
        ("vllm", "sudo -u me vllm serve m", "'-u' cannot be followed"),
        ("vllm", "uv run other m", "'other' cannot be followed"),
        ("vllm", "other vllm serve m", "'other' cannot be followed"),
        ("vllm", "vllm bench m", "'vllm' cannot be followed"),
        ("vllm", "python -m other m", "'python' cannot be followed"),
        ("vllm", "nohup", "'nohup' cannot be followed"),
        ("vllm", "vllm serve m > log", "'>' is of a shell"),
        ("llama.cpp", "cd x && ./llama-server -m a", "'&&' is of a shell"),
        ("llama.cpp", "./llama-cli -m a", "llama-cli' cannot be followed"),
        ("llama.cpp", " ", "has no words"),
    ],
)
def test_a_program_that_is_not_the_server_is_refused_by_name(engine, given, named):
    done = CliRunner().invoke(app, ["migrate", engine, given])
    assert named in str(done.exception)


def test_a_command_line_without_a_model_says_so():
    status, command, rows = migrated("vllm", "vllm serve --port 1")
    assert (status, " ".join(command)) == (1, "foreword serve --port 1")
    assert rows["model"]["remark"] == "None is given. Add a model, or --models-dir."


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("FROM a\n:bad line", "line 2, ':bad line'"),
        ("123 abc\nFROM a", "line 1, '123 abc'"),
        ("FROM a\n\nPARAMETER\n", "line 3, 'PARAMETER'"),
        ('FROM a\nPARAMETER stop """x\ny""" junk', "quotes do not end"),
        ('FROM a\nSYSTEM "x\n', "quotes do not end"),
        ("", "no instruction FROM"),
        ("# FROM a\nPARAMETER num_ctx 64", "no instruction FROM"),
    ],
)
def test_a_modelfile_with_a_line_that_cannot_be_read_is_refused(text, named):
    done = CliRunner().invoke(app, ["migrate", "ollama", "-"], input=text)
    assert named in str(done.exception)


@pytest.mark.parametrize("option", [*(f"--{name.replace('_', '-')} {{}}" for name in PARTS), "--allowed-origins []"])
def test_an_empty_value_of_several_is_named(option):
    status, command, rows = migrated("vllm", f"a {option}")
    assert (status, command) == (1, ["foreword", "serve", "a"])
    assert rows[option]["remark"] == "It is empty; leave it out."


@pytest.mark.parametrize(
    "value", [f"{'9' * 400}k", f"{'9' * 5000}G", f"1.{'9' * 400}k", "9" * 5000, "nan", "inf", "1e999"]
)
@pytest.mark.parametrize("option", ["--max-model-len", "--kv-offloading-size", "--port", "--kv-cache-memory-bytes"])
def test_a_number_that_is_too_large_or_not_finite_is_left_out_with_the_reason(option, value):
    status, command, rows = migrated("vllm", f"a {option} {value}")
    assert (status, command) == (1, ["foreword", "serve", "a"])
    assert "expected" in rows[f"{option} {value}"]["remark"] or "must be" in rows[f"{option} {value}"]["remark"]


def test_a_model_that_would_be_read_as_an_option_is_left_out():
    status, command, rows = migrated("llama.cpp", "llama-server --model=-inf")
    assert (status, command) == (1, ["foreword", "serve"])
    assert "would be read as an option" in rows["--model -inf"]["remark"]


def test_a_word_that_belongs_to_an_option_is_no_second_model():
    _, command, rows = migrated("llama.cpp", "llama-server -m a -fa on")
    assert (command, list(rows)) == (["foreword", "serve", "a"], ["-m a", "-fa on"])
    _, command, rows = migrated("vllm", "a --lora-modules x=./x y=./y --dtypes half b")
    assert " ".join(command) == "foreword serve a --adapter x=./x --adapter y=./y"
    assert rows["model b"]["remark"] == "It follows no option, and a is the model."


def test_a_modelfile_gives_the_model_its_settings_and_what_belongs_to_requests():
    text = '# mine\nFROM org/model\nPARAMETER num_ctx 4096\nPARAMETER stop "a b"\nSYSTEM """Be\nkind."""\n'
    status, command, rows = migrated("ollama", "-", text=text)
    assert status == 1
    assert command == ["foreword", "serve", "org/model", "--max-model-len", "4096"]
    assert rows["stop a b"]["remark"] == "A parameter of each request: stop."
    assert "role system" in rows["system Be\\nkind."]["remark"]


def test_a_modelfile_that_is_not_there_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["migrate", "ollama", str(tmp_path / "none")])
    assert "cannot be read as a Modelfile" in str(done.exception)


def test_an_open_quote_is_refused():
    done = CliRunner().invoke(app, ["migrate", "vllm", "vllm serve 'a b"])
    assert "Close its quotes" in str(done.exception)


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [("llama.cpp", "llama-server -m"), ("vllm", "python3 -m vllm.entrypoints.openai.api_server --model")],
)
def test_a_model_without_a_name_is_left_out_with_the_reason(engine, arguments):
    status, command, rows = migrated(engine, arguments)
    assert (status, command) == (1, ["foreword", "serve"])
    assert "needs a value" in rows[arguments.split()[-1]]["remark"]


def test_a_modelfile_without_the_name_of_its_model_is_not_served_as_one_without_a_name():
    status, command, _ = migrated("ollama", "-", text="FROM\n")
    assert (status, command) == (1, ["foreword", "serve"])


@pytest.mark.parametrize(
    ("engine", "given", "here"),
    [
        ("vllm", "--speculative-model b", "--speculation-model b --speculation draft_model"),
        ("vllm", "--speculative-model [ngram]", "--speculation ngram"),
        ("llama.cpp", "-md b", "--speculation-model b --speculation draft_model"),
        ("llama.cpp", "--model-draft b", "--speculation-model b --speculation draft_model"),
        ("llama.cpp", "--draft 5", "--speculation-num-tokens 5"),
        ("llama.cpp", "--draft-n 5", "--speculation-num-tokens 5"),
        ("llama.cpp", "--draft-max 5", "--speculation-num-tokens 5"),
        ("vllm", "--speculative-config.method ngram", "--speculation ngram"),
        ("vllm", "--speculative-config.method=deepseek_mtp", "--speculation head"),
        (
            "vllm",
            """--speculative-config '{"method":"ngram","num_speculative_tokens":4}'""",
            "--speculation ngram --speculation-num-tokens 4",
        ),
        (
            "vllm",
            """--speculative-config '{"model":"b","num_speculative_tokens":4}'""",
            "--speculation-model b --speculation draft_model --speculation-num-tokens 4",
        ),
        (
            "vllm",
            """--speculative-config='{"method":"draft_model","model":"b"}'""",
            "--speculation draft_model --speculation-model b",
        ),
        (
            "vllm",
            """--speculative-config '{"method":"ngram","prompt_lookup_min":3,"prompt_lookup_max":9}'""",
            "--speculation ngram --speculation-min-match 3 --speculation-max-match 9",
        ),
        (
            "vllm",
            """--speculative-config '{"method":"ngram","prompt_lookup_max":1}'""",
            "--speculation ngram --speculation-max-match 1 --speculation-min-match 1",
        ),
    ],
)
def test_options_of_speculation_keep_their_method(engine, given, here):
    status, command, _ = migrated(engine, f"a {given}")
    assert (status, " ".join(command)) == (0, f"foreword serve a {here}")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"method":"ngram","max_model_len":9}', "--speculative-config.max_model_len 9"),
        ('{"method":"ngram","model":"b"}', "--speculative-config.model b"),
    ],
)
def test_keys_of_speculation_without_a_counterpart_are_left_out_one_by_one(config, named):
    status, command, rows = migrated("vllm", f"a --speculative-config '{config}'")
    assert (status, " ".join(command)) == (1, "foreword serve a --speculation ngram")
    assert [text for text, row in rows.items() if not row["here"]] == [named]


@pytest.mark.parametrize("value", ["", " ngram", " '[1]'", " '{'"])
def test_a_speculative_config_that_is_no_object_is_refused(value):
    done = CliRunner().invoke(app, ["migrate", "vllm", f"a --speculative-config{value}"])
    assert "is not a JSON object" in str(done.exception)


def test_adapters_of_a_modelfile_get_names_that_requests_give():
    status, command, rows = migrated("ollama", "-", text="FROM a\nADAPTER ./x\nADAPTER ./y\n")
    assert (status, " ".join(command)) == (0, "foreword serve a --adapter adapter=./x --adapter adapter2=./y")
    assert "requests that name it as their model: adapter." in rows["adapter ./x"]["remark"]


@pytest.mark.parametrize("backend", ["", " --distributed-executor-backend mp"])
def test_an_option_that_the_default_executor_lacks_is_left_out_with_those_that_have_it(backend):
    status, command, rows = migrated("vllm", f"a --tensor-parallel-size 2 --dtype half --max-num-seqs 3{backend}")
    assert (status, " ".join(command)) == (1, "foreword serve a --max-num-seqs 3")
    assert "--tensor-parallel-size 2 needs --executor torch:" in rows["--tensor-parallel-size 2"]["remark"]
    assert "--dtype fp16 needs --executor torch or transformers or device:" in rows["--dtype half"]["remark"]
    assert rows["--max-num-seqs 3"]["remark"] == ""


@pytest.mark.parametrize(
    ("option", "here"),
    [
        ("--enable-log-requests", "--access-log"),
        ("--no-enable-log-requests", "--no-access-log"),
        ("--disable-log-requests", "--no-access-log"),
        ("--no-disable-log-requests", "--access-log"),
    ],
)
def test_a_switch_that_turns_something_off_does_not_turn_it_on(option, here):
    status, command, _ = migrated("vllm", f"a {option}")
    assert (status, command) == (0, ["foreword", "serve", "a", here])


def test_an_adapter_as_json_is_written_as_name_and_path():
    _, command, rows = migrated(
        "vllm", """a --lora-modules '{"name": "x", "path": "./x", "base_model_name": "a"}' y=./y z '{"name": "x"}'"""
    )
    assert " ".join(command) == "foreword serve a --adapter x=./x --adapter y=./y"
    assert [row["remark"] for row in rows.values()][-2:] == ["--adapter needs NAME=PATH."] * 2


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("vllm", "--dtype auto"), ("vllm", "--kv-cache-dtype auto"), ("vllm", "--max-model-len auto"),
        ("vllm", "--max-model-len -1"), ("llama.cpp", "-c 0"), ("llama.cpp", "-t -1"), ("llama.cpp", "-np -1"),
    ],
)  # fmt: skip
def test_a_value_with_the_effect_of_the_default_is_left_out(engine, given):
    _, command, rows = migrated(engine, f"a {given}")
    assert (command, rows[given]["remark"]) == (["foreword", "serve", "a"], "It is so by default; leave it out.")


@pytest.mark.parametrize("option", ["-s -1", "--seed -1"])
def test_the_number_that_means_any_seed_is_not_a_seed(option):
    _, command, rows = migrated("llama.cpp", f"a {option}")
    assert command == ["foreword", "serve", "a"]
    assert "another seed in each run" in rows[option]["remark"]
    _, command, rows = migrated("ollama", "-", text="FROM a\nPARAMETER seed -1\n")
    assert command == ["foreword", "serve", "a"]


@pytest.mark.parametrize("word", ["$KEY", "${KEY}", "$(cat key)"])
def test_what_a_shell_replaces_is_not_passed_on_as_it_is_written(word):
    status, command, rows = migrated("vllm", f"a --api-key '{word}'")
    assert (status, command) == (1, ["foreword", "serve", "a"])
    assert "A shell replaces" in rows[f"--api-key {word}"]["remark"]


@pytest.mark.parametrize(
    ("engine", "given", "here", "left_out"),
    [
        ("vllm", "--port 1 --port 2 --port 1", "--port 1", ["--port 2"]),
        (
            "vllm",
            "--enable-prefix-caching --no-enable-prefix-caching",
            "--no-prefix-caching",
            ["--enable-prefix-caching"],
        ),
        ("vllm", "--api-key x --api-key y", "--api-key x --api-key y", []),
        ("llama.cpp", "-ctk q8_0 --cache-type-v q8_0", "--kv-format int8", []),
        ("llama.cpp", "--cache-type-k q8_0 -ctv bf16", "--kv-format bf16", ["--cache-type-k q8_0"]),
    ],
)
def test_the_last_of_several_values_is_kept_and_the_others_are_named(engine, given, here, left_out):
    _, command, rows = migrated(engine, f"a {given}")
    assert " ".join(command) == f"foreword serve a {here}"
    assert [text for text, row in rows.items() if row["remark"].startswith("A later option")] == left_out


def test_a_socket_in_a_file_is_left_out():
    _, command, rows = migrated("llama.cpp", "llama-server -m a --host /run/a.sock")
    assert command == ["foreword", "serve", "a"]
    assert "not at sockets in files" in rows["--host /run/a.sock"]["remark"]


def test_a_model_that_an_option_names_precedes_a_word_without_option():
    _, command, rows = migrated("llama.cpp", "llama-server --lora-scaled x 0.5 -m a")
    assert command == ["foreword", "serve", "a"]
    assert rows["model 0.5"]["remark"] == "It follows no option, and a is the model."


def test_words_of_a_modelfile_are_separated_by_spaces_and_tabs():
    _, command, rows = migrated("ollama", "-", text="FROM a\nPARAMETER\tnum_ctx \t 64\nMESSAGE\tuser  hi\n")
    assert command == ["foreword", "serve", "a", "--max-model-len", "64"]
    assert list(rows) == ["from a", "num_ctx 64", "message user hi"]


VLLM = """
--speculative-model b
--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 1
--speculative-model [ngram] --ngram-prompt-lookup-min 20
--speculative-config '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":9}'
--speculative-config '{"method":"eagle3","model":"b","num_speculative_tokens":4}'
--speculative-config '{"method":"draft_model"}'
--speculative-config '{"method":"suffix","num_speculative_tokens":5000}'
--speculative-config '{"model":"b","draft_tensor_parallel_size":2}'
--speculative-config '{"method":["ngram"]}'
--tensor-parallel-size 2 --distributed-executor-backend ray
-tp 2 --dtype half --kv-cache-dtype fp8 --quantization awq
--dtype auto --kv-cache-dtype auto --gpu-memory-utilization 0.9 --enforce-eager --trust-remote-code
--max-num-seqs 0 --max-num-batched-tokens x --max-model-len -1
--lora-modules law=./law --lora-modules ./law --served-model-name x y
--scheduling-policy priority --enable-chunked-prefill --no-enable-prefix-caching --seed 3
--host 0.0.0.0 --port 8000 --api-key k --served-model-name x
""".strip().splitlines()
LLAMA = """
-md b --draft 16 --draft-min 2
--model-draft b -c 4096 -np 4 -ngl 99 -fa auto -ctk q8_0 -ctv f16
--draft-max 0
--lora x --lora y -t 2 -b 512 -ub 128
--mlock --no-mmap --jinja --host ::1 --port 1 --temp 0.5
""".strip().splitlines()
FILES = [
    "FROM a\nADAPTER ./x\nPARAMETER num_ctx 4096",
    "FROM a\nADAPTER x=y\nPARAMETER num_thread 2\nPARAMETER top_k 4",
]


@pytest.mark.parametrize(
    ("engine", "given"),
    [("vllm", f"vllm serve a {one}") for one in VLLM]
    + [("llama.cpp", f"llama-server -m a {one}") for one in LLAMA]
    + [("ollama", one) for one in FILES],
)
def test_the_options_of_each_written_command_exist_and_go_together(monkeypatch, engine, given):
    _, command, _ = migrated(engine, *(("-",) if engine == "ollama" else (given,)), text=given)
    served = []
    monkeypatch.setattr("foreword.server.run.run", lambda model, server, **options: served.append((model, options)))
    monkeypatch.setattr("foreword.server.listener.end_process_if_stuck", lambda: None)
    real_command("serve").main(command[2:], standalone_mode=False)
    ((model, options),) = served
    assert model == "a"
    split = split_options(options)
    kind = NATIVE if split.executor == "auto" else kind_of(split.executor)
    assert split.of_executor.keys() <= settings_of(kind.options).keys()
