"""Which models `foreword serve` has: arguments, [[model]] tables of its file, a directory."""

import re

import httpx
import pytest
from processes import start

from foreword.cli.served_models import served_models
from foreword.errors import ConfigError
from foreword.server.config import ServerConfig
from foreword.server.run_several import run_several, several
from foreword.server.served import ServedModel, checked

OPTIONS = {"max_num_seqs": 8, "seed": None}


def rows(given=(), tables=(), **settings):
    config = ServerConfig(**settings)
    return checked(served_models(given, tables, config, OPTIONS), config)


def test_arguments_have_the_options_of_all_and_tables_their_own():
    tables = [
        {"model": "c", "name": ["x", "y"], "max_num_seqs": 2, "kv_cache_bytes": "1MiB", "pin": True, "keep_alive": 9},
        {"model": "d", "name": "z", "adapter": ["law=./law"], "logits_processor": ["m:f"]},
    ]
    a, b, c, d = rows(["a", "b"], tables, model_keep_alive=60, pin=("b",))
    assert (a.model, a.names, a.options, a.pin, a.keep_alive) == ("a", ("a",), OPTIONS, False, 60)
    assert b.pin
    assert (c.names, c.pin, c.keep_alive) == (("x", "y"), True, 9)
    assert c.options == {**OPTIONS, "max_num_seqs": 2, "kv_cache_bytes": 1 << 20}
    assert (d.names, d.keep_alive, d.options["loras"]) == (("z",), 60, {"law": "./law"})
    assert d.options["logits_processors"] == ("m:f",)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "x"}, r"model\[0\]: has no model"),
        ({"model": "a", "max_num_seq": 3}, r"model\[0\].max_num_seq: unknown setting. Did you mean 'max_num_seqs'"),
        ({"model": "a", "max_num_seqs": 0}, r"model\[0\].max_num_seqs=0: must be from 1"),
        ({"model": "a", "pin": "yes"}, r"model\[0\].pin='yes'"),
        ({"model": "a", "keep_alive": -1}, r"model\[0\].keep_alive=-1"),
        ({"model": "a", "record": "x.jsonl"}, r"model\[0\].record: unknown setting"),
        ({"model": "a", "adapter": ["law"]}, "is not NAME=PATH"),
    ],
)
def test_what_a_table_cannot_have_is_refused_with_its_number(table, words):
    with pytest.raises(ConfigError, match=words):
        rows(tables=[table])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"served_model_name": ("x",)}, r"served_model_name=.*\[\[model\]\] tables"),
        ({"adapter": ("x=y",)}, r"adapter=.*\[\[model\]\] tables"),
        ({"kv_events": "tcp://*:5557"}, "kv_events=.*one model"),
        ({"replicas": 2}, "replicas=2: are of one model"),
        ({"pin": ("x",)}, "pin='x': no model has this name. Give one of a, b"),
    ],
)
def test_settings_of_one_model_are_refused_by_name(settings, words):
    with pytest.raises(ConfigError, match=words):
        rows(["a", "b"], **settings)
    with pytest.raises(ConfigError, match=words):
        run_several([ServedModel(model=name, names=(name,)) for name in "ab"], ServerConfig(**settings))


def test_a_record_of_several_models_is_refused():
    with pytest.raises(ConfigError, match=r"record='x\.jsonl': is for a server of one model"):
        several([ServedModel(model="a", names=("a",), options={"record": "x.jsonl"})], ServerConfig())


def test_a_time_limit_of_loading_is_of_a_server_whose_models_are_loaded_by_request():
    assert ServerConfig(load_timeout=5).of_several == {"load_timeout": 5}
    assert not ServerConfig().of_several


def test_models_of_a_file_are_served(talker, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        f'load_on_demand = true\nmax_model_len = 256\nkv_cache_bytes = "1MiB"\n\n'
        f'[[model]]\nmodel = "{talker}"\nname = ["a", "alias"]\n\n[[model]]\nmodel = "{talker}"\nname = "b"\n'
    )
    process = start("serve", "--config", file, "--port", 0)
    line = process.stderr.readline().decode()
    found = re.match(r"foreword: a, b at (http://\S+)", line)
    assert found, line + process.stderr.read().decode()
    with httpx.Client(base_url=found[1], trust_env=False, timeout=60) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(one["id"], one["state"]) for one in listed] == [
            ("a", "unloaded"), ("alias", "unloaded"), ("b", "unloaded"),
        ]  # fmt: skip
        answer = client.post("/v1/completions", json={"model": "alias", "prompt": "x", "max_tokens": 2})
        assert (answer.status_code, answer.json()["model"]) == (200, "alias")
        assert client.get("/ready").json()["models"] == {"a": "loaded", "b": "unloaded"}
    process.terminate()
    with process:
        assert process.wait(60) == 0
