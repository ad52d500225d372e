"""The server's settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foreword.errors import ConfigError, reason_of, shown
from foreword.kv_events.source import endpoint_of
from foreword.media.limits import MediaLimits
from foreword.routing import ROUTERS
from foreword.server.key_limits import DIGEST, KeyLimits, key_digest, read_limit
from foreword.settings import check_settings, setting, setting_of, settings_of

if TYPE_CHECKING:
    from foreword.engine.options import LLMOptions

FRONT_HEADERS = 1 << 10  # bytes
ENGINE_DEFAULTS: LLMOptions = {"seed": None, "max_logprobs": 20}
"""Options of the engine of a server, where they are not given: each run draws other tokens, and no client can ask for
the log-probabilities of a whole vocabulary.
"""


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@A-Z\s]+")


def _origins(texts: object) -> tuple[str, ...]:
    """Return origins as browsers send them. Raise ValueError for one that no origin is equal to."""
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) and _ORIGIN.fullmatch(t) for t in texts):
        raise ValueError("give a scheme and a host in lower case, without a path, such as https://example.com, or *")
    return tuple(texts)


def _key_limits(texts: object) -> tuple[str, ...]:
    """Return limits as they are given. Raise ValueError for one that cannot be read."""
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError("give a list of texts")
    for number, text in enumerate(texts, 1):
        try:
            read_limit(text)
        except ValueError as error:  # its text begins with a key
            raise ValueError(f"number {number}: {error}") from None
    return tuple(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of `foreword serve`. Raise ConfigError for a value of another type or out of range."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses.", value_name="ADDRESS")
    port: int = setting(8000, "Port; 0: any free one.", most=65535)
    served_model_name: tuple[str, ...] = setting(
        (), "Name of the model in requests; default: as it was given. Repeatable.", value_name="NAME"
    )
    adapter: tuple[str, ...] = setting(
        (), "LoRA adapter, which requests name as their model. Repeatable.", value_name="NAME=PATH"
    )
    adapter_directory: str | None = setting(
        None, "Directory whose adapters requests may load; without it they load none.", unit="path", value_name="DIR"
    )
    slot_save_path: str | None = setting(
        None,
        "Directory where /slots saves conversations, with their keys and values; without it, it saves none.",
        unit="path",
        value_name="DIR",
    )
    models_dir: str | None = setting(
        None,
        "Directory whose models are served, too: .gguf files, and directories of one model.",
        unit="path",
        value_name="DIR",
    )
    load_on_demand: bool = setting(False, "Load each model at its first request, not at the start.")
    ram_budget: int | None = setting(
        None, "Largest memory of the loaded models together: weights, KV pools and the tensors of steps. Models that "
        "were used least recently are unloaded for others. None: the memory of the machine.", least=1, most=2**50,
        unit="bytes",
    )  # fmt: skip
    model_keep_alive: float | None = setting(
        None, "Seconds for which a model without requests stays loaded. None: until its memory is needed."
    )
    pin: tuple[str, ...] = setting((), "Name of a model that is never unloaded. Repeatable.", value_name="NAME")
    load_timeout: float = setting(
        300.0, "Seconds that a request waits for its model to be loaded; beyond it: status 503.", least=0.01
    )
    data_directory: str | None = setting(
        None, "Directory for files, batches and stored responses, which survive restarts there. Without it there are "
        "no files and batches, and responses are stored in memory.", unit="path", value_name="DIR",
    )  # fmt: skip
    store_responses: bool = setting(
        True, "Store responses, so that others can follow them; with replicas that needs data_directory."
    )
    max_data_bytes: int = setting(
        1 << 30, "Largest size of what is stored, 128 MiB of it in memory; responses may have a quarter.",
        least=1 << 20, most=2**50, unit="bytes",
    )  # fmt: skip
    replicas: int = setting(1, "Processes that serve the model behind one address.", least=1, most=256)
    router: str = setting("prefix", "Policy that chooses the replica of a request.", choices=tuple(ROUTERS))
    api_key: tuple[str, ...] = setting((), "Key that requests must have. Repeatable.", value_name="KEY", is_shown=False)
    key_limit: tuple[str, ...] = setting(
        (), "API key, or sha256: and its digest, and what it may use: KEY share=2 requests=4 tokens_per_minute=60000, "
        "or some of these. share: its weight under policy=fair (1). Repeatable.",
        value_name="LIMITS", convert=_key_limits, is_shown=False,
    )  # fmt: skip
    admin_key: str | None = setting(
        None, "Key for routes that show or change the whole server.", value_name="KEY", is_shown=False
    )
    require_key: bool = setting(False, "Do not start without an API key.")
    cache_by_key: bool = setting(
        False, "Reuse cached prompts only between requests with the same API key, so that no client can learn from "
        "response times what others sent.",
    )  # fmt: skip
    cors_origin: tuple[str, ...] = setting(
        (), "Origin of web pages that may call the server; *: any. Repeatable.", value_name="URL", convert=_origins
    )
    allowed_host: tuple[str, ...] = setting(
        (), "Name that clients may call the server by; * for any. Default: localhost if the server listens on a "
        "loopback address and needs no key, else any. Repeatable.", value_name="NAME",
    )  # fmt: skip
    tls_certificate: str | None = setting(None, "Certificate file (PEM), for https.", unit="path", value_name="FILE")
    tls_key: str | None = setting(None, "File of the certificate's private key.", unit="path", value_name="FILE")
    max_requests: int = setting(1024, "Largest number of completions in progress; beyond it: status 429.", least=1)
    max_completions: int = setting(
        128, "Largest number of completions of one prompt (n, best_of); beyond it: status 400.", least=1
    )
    max_prompts: int = setting(
        2048, "Largest number of prompts, texts or documents of one body; beyond it: status 400.", least=1
    )
    max_prompt_tokens: int = setting(
        2**20, "Largest number of prompt tokens in progress; beyond it: status 429.", least=1
    )
    max_answer_bytes: int = setting(
        4 << 30, "Largest memory that one answer may need by its max_tokens, n and log-probabilities; beyond it: "
        "status 400. All large answers in progress share it; beyond it: status 429.", least=1, most=2**50, unit="bytes",
    )  # fmt: skip
    max_body_bytes: int = setting(8 << 20, "Largest body of a request.", least=1, unit="bytes")
    max_total_body_bytes: int = setting(
        256 << 20, "Largest memory of the bodies from 64 KiB on of all requests in progress; beyond it: status 429.",
        least=1, most=2**50, unit="bytes",
    )  # fmt: skip
    max_header_bytes: int = setting(32 << 10, "Largest head of a request.", least=256, unit="bytes")
    max_images: int = setting_of(MediaLimits, "max_images")
    max_media_bytes: int = setting_of(MediaLimits, "max_bytes")
    max_image_pixels: int = setting_of(MediaLimits, "max_pixels")
    max_sound_seconds: int = setting_of(MediaLimits, "max_seconds")
    media_host: tuple[str, ...] = setting_of(MediaLimits, "remote_hosts")
    media_timeout: float = setting_of(MediaLimits, "timeout")
    receive_timeout: float = setting(30.0, "Seconds allowed for receiving a request.", least=0.01)
    send_timeout: float = setting(
        60.0, "Seconds after which a connection is closed if its client reads nothing of the answer.", least=0.01
    )
    timeout: float | None = setting(None, "Seconds allowed for answering a request; default: no limit.", least=0.001)
    keep_alive: float = setting(15.0, "Seconds between keep-alive comments on an idle stream.", least=0.01)
    drain_timeout: float = setting(30.0, "Seconds allowed for finishing requests after a signal to end.")
    kv_events: str | None = setting(
        None, "Address where cache events are published; tcp://*:5557 binds, without * connects.", value_name="URL"
    )
    kv_events_replay: str | None = setting(
        None, "Address where readers ask for past events, such as tcp://*:5558.", value_name="URL"
    )
    kv_events_topic: str = setting("kv-events", "Topic of the events.", value_name="NAME")
    kv_events_arrays: bool = setting(False, "Publish events as arrays, as older versions of vLLM do, instead of maps.")
    otlp_traces_endpoint: str | None = setting(
        None, "Address that OpenTelemetry spans of requests are sent to.", value_name="URL"
    )
    access_log: bool = setting(
        False, "Log each request as a line of JSON; requests with a status of 500 or more are always logged."
    )

    @property
    def media(self) -> MediaLimits:
        """The limits of images and sounds, which are never files of this machine."""
        return MediaLimits(
            max_images=self.max_images,
            max_bytes=self.max_media_bytes,
            max_pixels=self.max_image_pixels,
            max_seconds=self.max_sound_seconds,
            local_files=False,
            remote_hosts=self.media_host,
            timeout=self.media_timeout,
        )

    @property
    def of_several(self) -> Mapping[str, object]:
        """The settings of several models that have not their default, by name."""
        known = settings_of(ServerConfig)
        names = ("models_dir", "load_on_demand", "ram_budget", "model_keep_alive", "pin", "load_timeout")
        return {name: value for name in names if (value := getattr(self, name)) != known[name].default}

    @property
    def shows_texts(self) -> bool:
        """Return whether routes for admins may show what clients wrote: not if these are clients, too. A replica has
        one key for both.
        """
        return self.admin_key is not None and self.admin_key not in self.api_key

    def behind_front(self, **own: Any) -> ServerConfig:
        """Return the settings of a replica, which gets requests that a front end has checked, with more headers."""
        longest = min(self.max_header_bytes + FRONT_HEADERS, 2**31)
        limits = tuple(limits.of_replica(self.replicas).written(key) for key, limits in self.key_limits)
        own = {"key_limit": limits, "store_responses": self.store_responses and self.data_directory is not None, **own}
        return replace(self, max_header_bytes=longest, cors_origin=(), access_log=False, **own)

    def of_replicas(self) -> list[ServerConfig]:
        """Return the settings of each replica, which publishes cache events at endpoints of its own."""
        given = {name: getattr(self, name) for name in ("kv_events", "kv_events_replay") if getattr(self, name)}
        found: list[dict[str, Any]] = [
            {name: endpoint_of(url, number) for name, url in given.items()} for number in range(self.replicas)
        ]
        for number, endpoints in enumerate(found):
            for name, url in endpoints.items():
                if any(url in other.values() for other in found[:number]) and url != given[name]:
                    raise ConfigError(
                        f"{name}={given[name]!r:.80}: replica {number} would use {url}, which is another replica's; "
                        f"choose ports of kv_events and kv_events_replay that differ by {self.replicas} or more"
                    )
        return [replace(self, **endpoints) for endpoints in found]

    def __post_init__(self) -> None:
        check_settings(self)
        for name, keys in (
            ("api_key", self.api_key),
            ("admin_key", () if self.admin_key is None else (self.admin_key,)),
        ):
            if any(key != key.strip() or not key.isprintable() for key in keys):  # no header can have such a key
                reason = "a key begins or ends with a space, or has characters that cannot be printed"
                raise ConfigError(f"{name}: {reason}; give keys without")
        for key, _ in map(read_limit, self.key_limit):
            if key not in self.api_key and not key.startswith(DIGEST):
                raise ConfigError("key_limit: has a key that is not one of api_key; give it there, too")
        if len({key_digest(key) for key, _ in self.key_limits}) < len(self.key_limit):
            raise ConfigError("key_limit: a key is given twice; give all of its limits in one text")
        if self.require_key and not self.api_key:
            raise ConfigError(
                "api_key: is missing, and require_key asks for one; set FOREWORD_SERVE_API_KEY to a key, or give "
                "--no-require-key"
            )
        if self.slot_save_path is not None and self.replicas > 1:
            raise ConfigError(
                f"slot_save_path={self.slot_save_path!r:.80}: slots belong to one process, and there are replicas; "
                "leave one of them out, or give cache_dir, which replicas share"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate, tls_key: give both or neither")
        for name in ("kv_events_replay", "kv_events_topic", "kv_events_arrays"):
            value, known = getattr(self, name), settings_of(ServerConfig)[name]
            if self.kv_events is None and value != known.default:
                raise ConfigError(f"{name}={shown(value)}: no events are published; give kv_events too")

    @property
    def key_limits(self) -> Iterator[tuple[str, KeyLimits]]:
        """The limits of each key that has some."""
        return map(read_limit, self.key_limit)

    def check_files(self) -> None:
        """Raise ConfigError for a directory or files that cannot be used."""
        if self.adapter_directory is not None and not Path(self.adapter_directory).is_dir():
            raise ConfigError(
                f"adapter_directory={self.adapter_directory!r:.80}: is not a directory; make it, or correct it"
            )
        if self.slot_save_path is not None and not os.access(self.slot_save_path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(
                f"slot_save_path={self.slot_save_path!r:.80}: is not a directory that can be written; make it, or "
                "correct it"
            )
        if self.tls_certificate is not None and self.tls_key is not None:
            self._check_tls(Path(self.tls_certificate), Path(self.tls_key))

    def _check_tls(self, certificate: Path, key: Path) -> None:
        """Raise ConfigError, which names the file, for a certificate and a key that cannot be used."""
        import ssl  # here: few servers need it

        for name, path, mark in (
            ("tls_certificate", certificate, b"CERTIFICATE-----"),
            ("tls_key", key, b"PRIVATE KEY-----"),
        ):
            try:
                is_pem = mark in path.read_bytes()
            except (OSError, ValueError) as error:
                raise ConfigError(f"{name}={str(path)!r:.200}: cannot be read ({reason_of(error)})") from None
            if not is_pem:
                what = "certificate" if path is certificate else "private key"
                raise ConfigError(f"{name}={str(path)!r:.200}: holds no {what} in PEM form; give a file with one")

        def refuse() -> NoReturn:
            raise ConfigError(f"tls_key={str(key)!r:.200}: is encrypted; give a file without a password")

        try:
            ssl.create_default_context().load_cert_chain(certificate, key, password=refuse)
        except OSError as error:
            given = f"tls_certificate={str(certificate)!r:.80}, tls_key={str(key)!r:.80}"
            is_other = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
            reason = "the key is not that of the certificate" if is_other else f"one of them is damaged ({error})"
            raise ConfigError(f"{given}: {reason}; give two PEM files that belong together") from None
