"""`foreword fuzz`: a search for silent faults of a server's prefix cache, over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, get_args
from urllib.parse import urlsplit

import typer

from foreword.blackbox import (
    BLOCK_SIZES,
    DEFAULT_MAX_WORDS,
    SCENARIOS,
    Finding,
    Fuzzer,
    Report,
    Route,
    Server,
    ServerError,
    Target,
    base_of,
    described,
    examine,
    script,
)
from foreword.cli.terminal import note
from foreword.errors import ConfigError

NOTHING, FOUND, NO_SERVER = 0, 1, 2  # exit status


def fuzz(
    url: Annotated[str, typer.Argument(help="A server with OpenAI's routes, such as http://127.0.0.1:8000.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model of the server; several may be adapters of one. Default: those it lists. Repeatable."
        ),
    ] = None,
    api_key: Annotated[str, typer.Option(help="Sent as a bearer token.")] = "",
    minutes: Annotated[float, typer.Option(min=0.01, max=1e5, help="Time of the search.")] = 10.0,
    runs: Annotated[int, typer.Option(min=0, max=10**9, help="Conversations to hold. 0: as time allows.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the shapes of conversations.")] = 0,
    concurrency: Annotated[int, typer.Option(min=2, max=512, help="Largest number of requests at the same time.")] = 16,
    route: Annotated[str, typer.Option(help=f"Route to try first: {' or '.join(get_args(Route))}.")] = "completions",
    block_sizes: Annotated[
        str, typer.Option(help="Tokens per block of the server's cache, or guesses, separated by commas.")
    ] = ",".join(map(str, BLOCK_SIZES)),
    max_words: Annotated[
        int, typer.Option(min=40, max=10**6, help="Longest prompt, in words of one letter.")
    ] = DEFAULT_MAX_WORDS,
    scenarios: Annotated[
        str | None, typer.Option(help=f"Some of {', '.join(SCENARIOS)}, separated by commas. Default: all.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=1e-9, max=100, help="Largest difference of equal answers, in nats. Default: measured."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=1e4, help="Longest time of a request, in seconds.")] = 120.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the script of a finding. Default: it is printed.")
    ] = None,
) -> None:
    """Search a running server for silent faults of its prefix cache. Exit status 1 if one is found.

    Exit status 2 if the server cannot be reached or its answers cannot be used. Requests go to this address alone.
    """
    target = Target(base_of(_checked_url(url)), route=_checked_route(route), timeout=timeout, api_key=api_key)
    sizes, names = _sizes(block_sizes), _names(scenarios)
    try:
        server = examine(target, model or (), max_words)
        _print_server(server)
        fuzzer = Fuzzer(
            server,
            seed=seed,
            concurrency=concurrency,
            block_sizes=sizes,
            tolerance=tolerance,
            scenarios=names,
            say=note,
        )
        print(f"noise: {fuzzer.report.noise}; differences above {fuzzer.report.tolerance:.2g} count", flush=True)
        report = fuzzer.run(seconds=60 * minutes, max_conversations=runs)
    except ServerError as error:
        print(f"foreword: {target.url}: {error}", file=sys.stderr)
        raise typer.Exit(NO_SERVER) from None
    _print_report(report)
    if report.finding is None:
        raise typer.Exit(NOTHING)
    _print_finding(report.finding)
    text = script(fuzzer.target, report.finding)
    if output is None:
        print(f"\n# -- the script ------------------------------------------------------------\n{text}")
    else:
        output.write_text(text, encoding="utf-8")
        print(f"\npython {output}    # sends this conversation again; API_KEY: its key; another address as an argument")
    raise typer.Exit(FOUND)


def _checked_url(url: str) -> str:
    try:
        at = urlsplit(url)
        is_good = at.scheme in ("http", "https") and bool(at.hostname) and at.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"{url!r}: expected an address such as http://127.0.0.1:8000")
    if at.path.rstrip("/") not in ("", "/v1") or at.query or at.fragment:
        raise ConfigError(f"{url!r}: has a path. Give the address alone; /v1 and what follows is added to it")
    return url


def _checked_route(route: str) -> Route:
    for known in get_args(Route):
        if route == known:
            found: Route = known
            return found
    raise ConfigError(f"--route {route!r}: must be {' or '.join(get_args(Route))}")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = [0]
    if not all(1 <= size <= 1 << 16 for size in sizes):
        raise ConfigError(f"--block-sizes {text!r}: expected integers from 1 to 65536, separated by commas")
    return sizes


def _names(text: str | None) -> list[str]:
    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCENARIOS:
            raise ConfigError(f"--scenarios {name!r}: must be one of {', '.join(SCENARIOS)}")
    return names


def _print_server(server: Server) -> None:
    target = server.target
    print(f"{target.url}{target.path}: {', '.join(server.models)}")
    compared = f"the {target.top} likeliest tokens of each place" if target.top else "texts"
    cold = "sent alone before" if target.cold == "none" else f"computed without the cache by {target.cold}"
    print(f"compared: {compared}; prompts of up to {server.max_words} words, {cold}")
    for text in server.notes:
        print(f"note: {text}")


def _print_report(report: Report) -> None:
    print(f"{report.num_conversations:,} conversations, {report.num_checked:,} answers compared")
    for kind, count in report.failures.most_common(10):
        print(f"requests that failed: {count:,} × {kind}")
    if report.unconfirmed:
        print(f"differences that did not come again: {report.unconfirmed:,}")
    print("a fault" if report.finding else "no fault found")


def _print_finding(finding: Finding) -> None:
    print(f"\n{finding.scenario}: {finding.num_shown} of {finding.num_copies} copies of this conversation show it")
    for line in described(finding.conversation, finding.number):
        print(f"  {line}")
    if finding.difference is not None:
        print(f"request {finding.number} is answered otherwise than alone: {finding.difference}")
    else:
        print(f"request {finding.number} found {finding.num_cached} tokens in the cache that have other salts")
