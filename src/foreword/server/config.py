"""The server's settings: one table for the command line, the environment and the configuration file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foreword.errors import ConfigError, nearest
from foreword.kv_events.source import endpoint_of
from foreword.media.limits import MediaLimits


def setting(default: Any, help: str, *, least: float = 0, most: float = 2**31, name: str = "") -> Any:
    """A field of `ServerConfig`. least, most: of a number. name: of its value, for messages and help."""
    make = {"default_factory": tuple} if default == () else {"default": default}
    return field(**make, metadata={"help": help, "least": least, "most": most, "name": name})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of `foreword serve`. ConfigError for a value of another type or out of range."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0: all.", name="ADDRESS")
    port: int = setting(8000, "Port; 0: any free one.", most=65535, name="N")
    served_model_name: tuple[str, ...] = setting((), "Name of the model in requests. Repeatable.", name="NAME")
    adapter: tuple[str, ...] = setting((), "LoRA adapter, a model of requests. Repeatable.", name="NAME=PATH")
    adapter_directory: str | None = setting(None, "Directory whose adapters requests may load.", name="DIR")
    replicas: int = setting(1, "Processes that serve the model, behind one address.", least=1, most=256, name="N")
    router: str = setting("prefix", "How a replica is chosen for a request.", name="NAME")
    api_key: tuple[str, ...] = setting((), "Key that requests must have. Repeatable.", name="KEY")
    admin_key: str | None = setting(None, "Key for routes that change the server.", name="KEY")
    cors_origin: tuple[str, ...] = setting((), "Web page that may call the server. Repeatable.", name="URL")
    tls_certificate: str | None = setting(None, "Certificate file (PEM), for https.", name="FILE")
    tls_key: str | None = setting(None, "File of its private key.", name="FILE")
    max_requests: int = setting(1024, "Most completions in progress; more: status 429.", least=1, name="N")
    max_prompt_tokens: int = setting(2**20, "Most prompt tokens in progress; more: status 429.", least=1, name="N")
    max_body_bytes: int = setting(8 << 20, "Largest body of a request.", least=1, name="N")
    max_header_bytes: int = setting(32 << 10, "Largest head of a request.", least=256, name="N")
    max_images: int = setting(16, "Most images of a conversation.", most=2**16, name="N")
    max_media_bytes: int = setting(16 << 20, "Largest file of an image or a sound.", least=1, name="N")
    max_image_pixels: int = setting(1 << 25, "Most pixels of an image.", least=1, name="N")
    max_sound_seconds: int = setting(600, "Longest sound.", least=1, name="N")
    media_host: tuple[str, ...] = setting((), "Host that images may be fetched from. Repeatable.", name="NAME")
    media_timeout: float = setting(10.0, "Most seconds for fetching an image.", least=0.01, name="X")
    receive_timeout: float = setting(30.0, "Most seconds for receiving a request.", least=0.01, name="X")
    timeout: float | None = setting(None, "Most seconds for answering a request.", least=0.001, name="X")
    keep_alive: float = setting(15.0, "Seconds between signs of life in silent streams.", least=0.01, name="X")
    drain_timeout: float = setting(30.0, "Most seconds to finish requests at the end.", least=0, name="X")
    kv_events: str | None = setting(None, "Publish cache events; tcp://*:5557 binds, without * connects.", name="URL")
    kv_events_replay: str | None = setting(None, "Where readers ask for past events: tcp://*:5558.", name="URL")
    kv_events_topic: str = setting("kv-events", "Topic of the events.", name="NAME")
    kv_events_arrays: bool = setting(False, "Events as arrays, for readers older than maps.")
    otlp_traces_endpoint: str | None = setting(None, "Where to send OpenTelemetry's spans of requests.", name="URL")
    access_log: bool = setting(False, "Log each request as a line of JSON.")

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

    def of_replicas(self) -> list[ServerConfig]:
        """The settings of each replica, which publishes cache events at endpoints of its own."""
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
        for item in fields(self):
            _check(item.name, getattr(self, item.name), str(item.type), item.metadata)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_certificate, tls_key: give both or neither")


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """From names and values, such as those of a configuration file. ConfigError for an unknown name."""
    known = [item.name for item in fields(ServerConfig)]
    for name in given.keys() - set(known):
        raise ConfigError(f"{name}={given[name]!r:.80}: unknown setting; did you mean {nearest(name, known)!r}?")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return ServerConfig(**values)


def _check(name: str, value: Any, kind: str, limits: Mapping[str, Any]) -> None:
    """ConfigError unless the value has the annotated type and lies within its limits."""
    if value is None and "None" in kind:
        return
    is_number = "int" in kind or "float" in kind
    if kind.startswith("tuple"):
        fits = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    elif is_number:
        fits = type(value) is int or ("float" in kind and type(value) is float and math.isfinite(value))
    else:
        fits = type(value) is (bool if kind == "bool" else str) and value != ""
    if not fits:
        raise ConfigError(f"{name}={value!r:.80}: expected {kind.removesuffix(' | None')}")
    if is_number and not limits["least"] <= value <= limits["most"]:
        raise ConfigError(f"{name}={value!r:.80}: must be from {limits['least']} to {limits['most']}")
