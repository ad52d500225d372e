"""The kinds of executors: what each needs, which options it has, and how it is made.

A kind imports the executor when it makes one: the list costs no import of PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from foreword.errors import ConfigError, shown
from foreword.executors.encoder import EncoderExecutor
from foreword.executors.executor import Executor
from foreword.executors.memory import HostBytes, activation_bytes, index_score_bytes, num_weights, score_bytes
from foreword.executors.options import (
    DeviceOptions,
    ExecutorOptions,
    NativeOptions,
    ThreadOptions,
    TorchOptions,
    TransformersOptions,
    VisionOptions,
)
from foreword.executors.pool import PoolSize
from foreword.installation import install
from foreword.models.encoder_spec import EncoderSpec
from foreword.models.pooling import PoolingSpec
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Weights
from foreword.native import available
from foreword.plugins import load_plugin, made
from foreword.settings import settings_of

if TYPE_CHECKING:  # few models take images
    from foreword.executors.vision.encoder import ImageEncoder
    from foreword.models.vision_files import LoadedVision

O = TypeVar("O", bound=ExecutorOptions)  # noqa: E741


class ExecutorKind(ABC, Generic[O]):
    """A kind of executor.

    name: the name that users write. options: the class of its options. packages: the modules that it needs. extra: the
    extra of pyproject.toml that installs them. prefers_async: whether steps are planned ahead unless the settings say
    otherwise.
    runs_drafts: whether it runs draft models too; otherwise these run on `best_kind`.
    sees_later: whether its decoders compute tokens that see later ones, and vectors that later layers add (`is_causal`,
    `sees_spans` and `num_features` of `DecoderSpec`).
    speculates: whether drafts are verified by default. It is true where drafts change no token, because no result
    depends on the batch.
    """

    name: str
    options: type[O]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    prefers_async: ClassVar[bool] = False
    runs_drafts: ClassVar[bool] = True
    sees_later: ClassVar[bool] = False
    speculates: ClassVar[bool] = False

    @property
    def is_installed(self) -> bool:
        return all(find_spec(name) is not None for name in self.packages)

    def check_installed(self) -> None:
        """Raise ConfigError, with what to install, if a package is missing."""
        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise ConfigError(f"executor={self.name!r}: {' and '.join(missing)} not installed. {install(self.extra)}")

    def read_options(self, given: Mapping[str, Any]) -> O:
        """Return the options. Raise ConfigError for an option that this kind does not have, and for an invalid value.

        None stands for the default.
        """
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            if name not in settings_of(self.options):
                own = " or ".join(repr(other.name) for other in KINDS.values() if name in settings_of(other.options))
                raise ConfigError(
                    f"{name}={shown(value)}: executor {self.name!r} has no such option; give executor {own}, or leave "
                    "it out"
                )
        return self.options(**given)

    def bytes_per_value(self, spec: DecoderSpec, weights: Weights, options: O) -> float:
        """Return the bytes of one number of a key or value in the cache, scales included."""
        return 4

    def state_bytes(self, spec: DecoderSpec) -> int:
        """Return the bytes of the state of one request in all recurrent layers."""
        return 4 * spec.num_state_slots * spec.state_size

    def num_context_ranks(self, options: O) -> int:
        """Return the number of ranks over which keys and values are divided by position."""
        return 1

    def host_bytes(
        self, spec: DecoderSpec, weights: Weights, options: O, *, num_tokens: int, length: int
    ) -> HostBytes | None:
        """Return the bytes of host memory that a decoder takes beside its KV pool; None if its pool is not in host
        memory, or if the number is not known.

        num_tokens: the tokens of the largest step. length: the tokens of the longest request.
        """
        return None

    def weights_key(self, spec: DecoderSpec, weights: Weights, options: O) -> str | None:
        """Return a key that is equal for weights whose memory the executors of several models share; None if each
        executor has its own memory.
        """
        return None

    @abstractmethod
    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: O
    ) -> Executor:
        """Return an executor of a decoder. Raise what the constructor of the executor raises."""

    def encoder(self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec, options: O) -> EncoderExecutor:
        """Return an executor of an encoder. Raise ConfigError if this kind has none."""
        raise ConfigError(f"executor={self.name!r}: runs decoders only; leave it out, or use executor='torch'")

    def images(self, loaded: LoadedVision, options: O) -> ImageEncoder:
        """Return an encoder of images beside a decoder. Raise what `NativeExecutor` raises."""
        from foreword.executors.vision.encoder import ImageEncoder
        from foreword.executors.vision.towers import native_tower, numpy_tower

        own, spec = self.tower_options(options), loaded.spec
        tower = numpy_tower(spec, loaded.weights) if own is None else native_tower(spec, loaded.weights, own)
        kept = options if isinstance(options, VisionOptions) else VisionOptions()
        return ImageEncoder(loaded, tower, kept.media_cache_bytes)

    def tower_options(self, options: O) -> NativeOptions | None:
        """Return the options of the native layers of an encoder of images beside a decoder; None if NumPy runs them."""
        if not available():
            return None
        return NativeOptions(num_threads=options.num_threads if isinstance(options, ThreadOptions) else None)

    def for_drafts(self, options: O) -> tuple[ExecutorKind[Any], ExecutorOptions]:
        """Return the kind and the options of a draft model beside a model on this executor."""
        if self.runs_drafts:
            return self, options
        kind = best_kind()
        return kind, kind.read_options({})


class NativeKind(ExecutorKind[NativeOptions]):
    """The CPU kernels."""

    name, options, sees_later = "native", NativeOptions, True
    speculates = True

    @property
    def is_installed(self) -> bool:
        return available()

    def check_installed(self) -> None:
        if not available():
            raise ConfigError("executor='native': the native module is not built; install with a C++20 compiler")

    def bytes_per_value(self, spec: DecoderSpec, weights: Weights, options: NativeOptions) -> float:
        from foreword.executors.native import bytes_per_value

        return bytes_per_value(spec, options.kv_format)

    def state_bytes(self, spec: DecoderSpec) -> int:
        from foreword.executors.native import state_bytes

        return state_bytes(spec)

    def tower_options(self, options: NativeOptions) -> NativeOptions:
        return options

    def host_bytes(
        self, spec: DecoderSpec, weights: Weights, options: NativeOptions, *, num_tokens: int, length: int
    ) -> HostBytes:
        from foreword.executors.native import packed_bytes
        from foreword.executors.nodes import first_nodes
        from foreword.machine import default_threads

        num_threads = options.num_threads or default_threads(first_nodes(options.numa_nodes))
        activations = activation_bytes(spec, num_tokens) + index_score_bytes(spec, num_threads, length)
        return HostBytes(packed_bytes(spec, weights, options.weight_format), activations)

    def weights_key(self, spec: DecoderSpec, weights: Weights, options: NativeOptions) -> str | None:
        from foreword.executors.native import weights_key

        return weights_key(spec, weights, options)

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: NativeOptions
    ) -> Executor:
        from foreword.executors.native import NativeExecutor

        return NativeExecutor(
            spec,
            weights,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_states=size.num_states,
            pooling=pooling,
            **options.values(),
        )

    def encoder(
        self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec, options: NativeOptions
    ) -> EncoderExecutor:
        from foreword.executors.native_encoder import NativeEncoderExecutor

        return NativeEncoderExecutor(spec, weights, pooling, **options.values())


class NumpyKind(ExecutorKind[VisionOptions]):
    """The arithmetic in NumPy: short, slow, and the definition that the other kinds are compared with."""

    name, options, sees_later = "numpy", VisionOptions, True

    def tower_options(self, options: VisionOptions) -> None:
        return None

    def host_bytes(
        self, spec: DecoderSpec, weights: Weights, options: VisionOptions, *, num_tokens: int, length: int
    ) -> HostBytes:
        activations = activation_bytes(spec, num_tokens) + score_bytes(spec, num_tokens, length)
        return HostBytes(4 * num_weights(weights), activations)

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: VisionOptions
    ) -> Executor:
        from foreword.executors.numpy import NumpyExecutor

        return NumpyExecutor(
            spec,
            weights,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_states=size.num_states,
            pooling=pooling,
        )

    def encoder(
        self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec, options: VisionOptions
    ) -> EncoderExecutor:
        return EncoderExecutor(spec, weights, pooling)


class TorchKind(ExecutorKind[TorchOptions]):
    """Foreword's models in PyTorch."""

    name, options = "torch", TorchOptions
    packages, extra = ("torch",), "torch"

    def bytes_per_value(self, spec: DecoderSpec, weights: Weights, options: TorchOptions) -> float:
        from foreword.executors.torch.cache import slot_sizes
        from foreword.executors.torch.executor import cache_layers
        from foreword.executors.torch.options import dtype_of

        dtype = dtype_of(options.dtype, weights)
        stored = sum(slot_sizes(cache_layers(spec)[0], 1, dtype))  # layers that take what others choose have less
        return int(dtype.itemsize) * stored / max(spec.num_slots * spec.token_size, 1)

    def host_bytes(
        self, spec: DecoderSpec, weights: Weights, options: TorchOptions, *, num_tokens: int, length: int
    ) -> HostBytes | None:
        if not options.is_on_host:
            return None
        from foreword.executors.torch.options import dtype_of

        size = dtype_of(options.dtype, weights).itemsize if options.weight_format == "auto" else 1
        activations = activation_bytes(spec, num_tokens) + score_bytes(spec, num_tokens, length)
        return HostBytes(size * num_weights(weights), activations * options.num_ranks)

    def num_context_ranks(self, options: TorchOptions) -> int:
        return options.context_parallel_size

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: TorchOptions
    ) -> Executor:
        from foreword.executors.torch.executor import TorchExecutor
        from foreword.executors.torch.parallel import ParallelExecutor

        make = TorchExecutor if options.num_ranks == 1 else ParallelExecutor
        return make(
            spec,
            weights,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            num_states=size.num_states,
            pooling=pooling,
            **options.values(),
        )

    def encoder(
        self, spec: EncoderSpec, weights: Weights, pooling: PoolingSpec, options: TorchOptions
    ) -> EncoderExecutor:
        from foreword.executors.torch.encoder import TorchEncoderExecutor

        return TorchEncoderExecutor(spec, weights, pooling, **options.values())

    def for_drafts(self, options: TorchOptions) -> tuple[ExecutorKind[Any], ExecutorOptions]:
        return self, replace(options, tensor_parallel_size=1, context_parallel_size=1)


class DeviceKind(ExecutorKind[DeviceOptions]):
    """Foreword's models on a GPU that prepares its steps itself."""

    name, options = "device", DeviceOptions
    packages, extra = ("torch", "triton"), "torch"
    prefers_async = True

    def bytes_per_value(self, spec: DecoderSpec, weights: Weights, options: DeviceOptions) -> float:
        from foreword.executors.torch.options import dtype_of

        of_float = int(dtype_of(options.dtype, weights).itemsize)
        return 1 + 4 / spec.head_dim if options.kv_format == "fp8" else of_float

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: DeviceOptions
    ) -> Executor:
        from foreword.executors.torch.on_rows import device_executor

        return device_executor(
            spec,
            weights,
            num_blocks=size.num_blocks,
            block_size=size.block_size,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            **options.values(),
        )

    def for_drafts(self, options: DeviceOptions) -> tuple[ExecutorKind[Any], ExecutorOptions]:
        """Return the torch kind. A draft model's tokens are replaced in place, which rows on a device do not follow."""
        own = {name: value for name, value in options.values().items() if name in settings_of(TorchOptions)}
        return TORCH, TorchOptions(**own)


class TransformersKind(ExecutorKind[TransformersOptions]):
    """Models of the transformers library, which loads them itself (`foreword.engine.transformers_model`)."""

    name, options = "transformers", TransformersOptions
    packages, extra = ("torch", "transformers"), "transformers"
    runs_drafts = False

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: TransformersOptions
    ) -> Executor:
        raise ConfigError("executor='transformers': runs the models that transformers loads; leave it out for this one")


ExecutorFactory = Callable[[DecoderSpec, Weights, PoolSize], Executor]
"""A function that makes an executor for a decoder and a pool of KV blocks."""


class OwnKind(ExecutorKind[ExecutorOptions]):
    """An executor that a user brings, as an object or as a factory."""

    options, runs_drafts = ExecutorOptions, False

    def __init__(self, name: str, make: ExecutorFactory) -> None:
        self.name, self._make = name, make

    def decoder(
        self, spec: DecoderSpec, weights: Weights, size: PoolSize, pooling: PoolingSpec, options: ExecutorOptions
    ) -> Executor:
        return made("executor", self._make, spec, weights, size, kind=Executor)


NATIVE, NUMPY, TORCH, TRANSFORMERS, DEVICE = NativeKind(), NumpyKind(), TorchKind(), TransformersKind(), DeviceKind()
_KINDS: tuple[ExecutorKind[Any], ...] = (NATIVE, NUMPY, TORCH, TRANSFORMERS, DEVICE)
KINDS = {kind.name: kind for kind in _KINDS}
"""The kinds by their names. Installed packages announce others as entry points of "foreword.executors"."""

ExecutorChoice = str | ExecutorKind[Any] | ExecutorFactory | Executor
"""An executor as users give it: "auto", a name of `KINDS`, a plug-in, a kind, a factory, or an executor itself."""


def best_kind() -> ExecutorKind[Any]:
    """Return the kind of "auto": the native one if it is built, else NumPy."""
    return NATIVE if available() else NUMPY


def installed_kind(given: ExecutorChoice) -> ExecutorKind[Any]:
    """Return the given kind of executor. Raise ConfigError for one that does not exist or is not installed."""
    kind = kind_of(given)
    kind.check_installed()
    return kind


def kind_of(given: ExecutorChoice) -> ExecutorKind[Any]:
    """Return the given kind of executor. Raise ConfigError for one that does not exist."""
    if isinstance(given, str):
        given = best_kind() if given == "auto" else KINDS.get(given) or _announced(given)
    if isinstance(given, ExecutorKind):
        return given
    if not isinstance(given, type) and isinstance(given, Executor):
        executor = given
        return OwnKind(type(executor).__name__, lambda spec, weights, size: executor)
    if callable(given):
        return OwnKind(getattr(given, "__name__", type(given).__name__), given)
    raise ConfigError(f"executor={shown(given)}: must be {_NAMES}, an executor, or a function that makes one")


_NAMES = f"one of 'auto', {', '.join(map(repr, KINDS))}"


def _announced(name: str) -> ExecutorChoice:
    try:
        found = load_plugin("executors", name)
    except ValueError as error:
        raise ConfigError(f"executor={name!r}: must be {_NAMES}, or a plug-in: {error}") from None
    if isinstance(found, ExecutorKind) or callable(found):
        return found
    raise ConfigError(
        f"executor={name!r}: is {shown(found)}, and must be an ExecutorKind or a function that makes an executor"
    )
