"""Files of options (`--config`) of `foreword serve`, read as by the command."""

from functools import cache

import typer

from foreword.cli.app import app
from foreword.cli.serve import ENGINE, SERVER
from foreword.errors import ConfigError
from fuzz.mutations import DEEP, mutate_bytes, mutate_text
from fuzz.target import Target

FILE = """\
# a server
max_requests = 64
served_model_name = ["a", "b"]
api_key = ["one"]
host = "127.0.0.1"
drain_timeout = 2.5
max_model_len = 4096
kv_cache_bytes = 1_000_000
prefix_caching = true
executor = "native"
adapter = ["law=somewhere"]
seed = 0x10
"""
WORDS = (
    *(" = ", "= [", "]", "[[", "[a]\n", "[[a]]\n", '"', "'''", '"""', "{a = 1}", "{", "}", ",", ".", "#", "\n", "\0"),
    *("true", "false", "inf", "-inf", "nan", "1e999", "0", "1" * 400, "0x" + "f" * 4000, "2020-01-01", "12:30:00"),
    *("max_requests", "replicas", "router", "tls_certificate", "cors_origin", "speculation", "dtype", "config", "port"),
    *('"\\ud800"', '"\\u0000"', "é🙂", "['a', 1, {}]", "a" * 5000, "[" * 50, "x." * 50 + "y = 1\n", "[x." + "y." * 50),
)  # fmt: skip


def valid():
    parsed([])  # the command is made before workers are forked: that takes longer than reading a file
    return [FILE.encode()]


@cache
def command():
    group = typer.main.get_command(app)
    parent = group.make_context("foreword", [], resilient_parsing=True)
    return group.get_command(parent, "serve"), parent


def parsed(arguments):
    """The values of all options of the command."""
    serve, parent = command()
    with serve.make_context("serve", ["model", *arguments], parent=parent) as context:
        return context.params


def hostile():
    texts = ["a=" + "[" * DEEP, "a=" + "{a=" * 5000, "a." * 3000 + "b=1", "[a." + "b." * 3000 + "c]", "[" * DEEP]
    texts += [f"max_requests = {value}" for value in ("9" * 5000, "0x" + "f" * 100_000, "1e999", "nan", "[1]", "''")]
    texts += [f"{name} = {'9' * 4000}" for name in ("port", "seed", "max_num_seqs", "kv_cache_bytes", "send_timeout")]
    texts += [
        "x" * 10**6 + " = 1",
        "model = '" + "m" * 10**6 + "'",
        "host = '\\u0000'",
        "api_key = ['']",
        "\ufeffa = 1",
    ]
    return [*(text.encode() for text in texts), b"\xff\xfe", b"", b"\0"]


def mutate(rng, data):
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    return mutate_text(rng, data.decode(), WORDS).encode()


def read(data, folder):
    path = folder / "options.toml"
    path.write_bytes(data)
    try:
        given = parsed(["--config", str(path)])
    except typer.BadParameter as error:
        error.format_message()
        raise ConfigError("refused") from None
    for made in (ENGINE, SERVER):
        made.make(**{name: given[name] for name in made.options})


TARGET = Target(valid, read, mutate, hostile)
