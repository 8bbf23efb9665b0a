"""EngineConfig: what model.json may say. Nothing else configures the engine.

vLLM's names are accepted where they mean the same. Unknown keys fail the load by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowprefill.errors import ConfigError, InvalidParameterError, shorten
from flowprefill.granularity import Granularity
from flowprefill.request import MAX_NAME_CHARS, MAX_SLO_S, SLO

IGNORED_KEYS = frozenset(
    {"disable_log_requests", "disable_log_stats", "enforce_eager", "max_num_batched_tokens"}
)
"""vLLM keys that have no effect here; a model.json that sets them loads with a log line."""

PolicyName = Literal["fcfs", "sjf", "srpt", "edf", "s-edf", "goodput"]
POLICIES: tuple[str, ...] = typing.get_args(PolicyName)

MAX_RANK = 1_000
MAX_WEIGHT = 1e6

_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "block_size",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "max_slice_ms",
    "max_waiting_requests",
    "max_waiting_tokens",
    "queue_timeout_ms",
    "num_threads",
)
_OBJECTIVES = ("ttft_slo_ms", "tbt_slo_ms")
_SHARES = ("gpu_memory_utilization", "kv_cache_memory_fraction", "max_decode_share")


@dataclass(frozen=True)
class SLOClass:
    """A named kind of traffic: the operator defines it, a request chooses it by its name."""

    name: str
    """What requests put into `slo_class`."""
    ttft_slo_ms: float | None = None
    """TTFT objective, milliseconds; None = the model's."""
    tbt_slo_ms: float | None = None
    """TBT objective, milliseconds; None = the model's."""
    rank: int = 0
    """Among requests that can be on time, a higher one goes first; -1,000 to 1,000."""
    weight: float = 1.0
    """Worth of one on-time request beside those of other classes; in (0, 1,000,000]."""

    def __post_init__(self) -> None:
        place = f"slo_classes[{shorten(repr(self.name))}]."
        _check_types(self, place)
        if not 0 < len(self.name) <= MAX_NAME_CHARS:
            raise _error(f"{place}name", self.name, f"a text of 1 to {MAX_NAME_CHARS} characters")
        for name in _OBJECTIVES:
            _check_objective(place + name, getattr(self, name))
        if not -MAX_RANK <= self.rank <= MAX_RANK:
            raise _error(f"{place}rank", self.rank, f"in [{-MAX_RANK}, {MAX_RANK}]")
        if not 0 < self.weight <= MAX_WEIGHT:
            raise _error(f"{place}weight", self.weight, f"> 0 and <= {MAX_WEIGHT:.0f}")

    @staticmethod
    def from_dict(values: object) -> SLOClass:
        """Build from one object of `slo_classes`. Raises ConfigError naming the offending key."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"model.json: slo_classes: {shorten(repr(values))} is no object")
        known = {f.name for f in dataclasses.fields(SLOClass)}
        _check_keys(values, known, "name", "model.json: slo_classes")
        return SLOClass(**values)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes one engine; the fields of model.json."""

    model: str
    """A .gguf file, a Hugging Face directory (config.json + safetensors), or `package:NAME` for
    the GGUF file inside an installed Python package."""
    tokenizer: str | None = None
    """Directory or file of the tokenizer; None = beside the model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto = bfloat16 where the device multiplies it natively, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "native", "triton", "torch"] = "auto"
    """Operators: native = the C++ kernels, of a CPU, triton = the Triton kernels, of cuda; either
    one, or an error that says why there are none. torch = plain torch. auto = those of the device
    where they run and torch has nothing better. native on cuda is auto."""
    program: Literal["auto", "native", "hooks"] = "auto"
    """native = our own operators, or an error that says which architectures have them; hooks = the
    transformers model itself, suspended at its modules; auto = native where that runs the model as
    it is."""
    hook_boundaries: tuple[str, ...] = ()
    """hooks: class names of the modules before which a pass may be left; none = the token mixer and
    the MLP, or mixture of experts, of each layer."""
    max_model_len: int | None = None
    """Prompt + generated tokens of one request at most; None = the model's own limit."""
    max_num_seqs: int = 16
    """Requests that decode together at most."""
    block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache, bytes. None, with no kv_cache_memory_fraction either = room for four
    requests of max_model_len on a CPU, for less than that if it were over half of what is free, or
    gpu_memory_utilization of the card."""
    kv_cache_memory_fraction: float | None = None
    """Size of the KV cache as a share of the memory that is free on the device once the weights are
    loaded; in (0, 1]. Not beside kv_cache_memory_bytes."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a CUDA card's memory for weights, KV cache and what begun prefills hold beside
    it; in (0, 1]. No effect on cpu."""
    tensor_parallel_size: int = 1
    """Ranks that share the model, with a device and a process each; divides its heads, KV heads and
    intermediate size. On a CPU each has its part of the cores. kv_cache_memory_bytes is for each.
    Not for native kernels or hooks."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of ended requests while nobody needs the room, for prompts that begin
    alike."""
    seed: int = 0
    """Seeds the draws of requests that bring no seed."""
    policy: PolicyName = "goodput"
    granularity: str = "tile"
    """Where a prefill may be preempted: whole, chunk:N, layer, op, tile."""
    ttft_slo_ms: float = 1000.0
    """TTFT objective of a request that names none."""
    tbt_slo_ms: float = 200.0
    """TBT objective of a request that names none."""
    slo_classes: tuple[SLOClass, ...] = ()
    """Kinds of traffic that a request may choose by `slo_class`; in model.json a list of objects
    with the fields of SLOClass, of which only the name is required."""
    on_infeasible: Literal["demote", "reject"] = "demote"
    """What becomes of a waiting request that can no longer be on time: demote = served after those
    that can, reject = answered UNAVAILABLE at once."""
    starvation_share: float = 0.05
    """Device share that prefills past their deadline get at least, whatever else waits; in
    [0, 0.5], 0 = none."""
    fair_share: bool = False
    """Divide the device evenly among tenants, by tokens."""
    max_slice_ms: float = 4.0
    """Longest slice aimed at; bounds the blocking time."""
    max_decode_share: float = 0.5
    """Largest share of the device that decode steps may take from waiting prefills; in (0, 1]."""
    max_waiting_requests: int = 4_096
    """Requests that have not started at most; a further one is answered UNAVAILABLE."""
    max_waiting_tokens: int | None = None
    """Prompt tokens of the requests that have not started at most; None = no bound. A request that
    waits alone may be longer."""
    queue_timeout_ms: float = 60_000.0
    """A request that has not started after this time is answered UNAVAILABLE."""
    cancel_poll_ms: float = 100.0
    """How often a live request is asked whether its client has gone; >= 20."""
    num_threads: int | None = None
    """Threads of CPU operators; None = all cores."""

    def __post_init__(self) -> None:
        _check_types(self)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**63:
                raise _error(name, value, "finite and > 0")
        for name in _OBJECTIVES:
            _check_objective(name, getattr(self, name))
        for name in _SHARES:
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise _error(name, value, "in (0, 1]")
        if not 0 <= self.starvation_share <= 0.5:
            raise _error("starvation_share", self.starvation_share, "in [0, 0.5]")
        if not 20 <= self.cancel_poll_ms < math.inf:
            raise _error("cancel_poll_ms", self.cancel_poll_ms, "finite and >= 20")
        if not self.model:
            raise _error("model", self.model, "the name of a file or directory")
        if self.tensor_parallel_size > 1:
            for name, value in (("kernels", "native"), ("program", "hooks")):
                if getattr(self, name) == value:
                    limit = f"1 with {name}={value!r}"
                    raise _error("tensor_parallel_size", self.tensor_parallel_size, limit)
        if None not in (self.kv_cache_memory_bytes, self.kv_cache_memory_fraction):
            limit = f"left out beside kv_cache_memory_bytes={self.kv_cache_memory_bytes}"
            raise _error("kv_cache_memory_fraction", self.kv_cache_memory_fraction, limit)
        names = [c.name for c in self.slo_classes]
        for name in names:
            if names.count(name) > 1:
                raise _error("slo_classes", names, f"different names ({name!r} is there twice)")
        Granularity.parse(self.granularity)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> EngineConfig:
        """Build from the keys of model.json. Raises ConfigError naming the offending key."""
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        _check_keys(values, known | IGNORED_KEYS, "model", "model.json")
        fields = {k: v for k, v in values.items() if k in known}
        classes = fields.get("slo_classes", ())
        if not isinstance(classes, (list, tuple)):
            raise _error("slo_classes", classes, "a list of objects")
        fields["slo_classes"] = tuple(map(SLOClass.from_dict, classes))
        if isinstance(fields.get("hook_boundaries"), list):
            fields["hook_boundaries"] = tuple(fields["hook_boundaries"])
        return EngineConfig(**fields)

    @staticmethod
    def from_file(path: Path) -> tuple[EngineConfig, list[str]]:
        """Read model.json. Returns the config and the keys that have no effect here."""
        if not path.is_file():
            raise ConfigError(f"{path}: model.json with the engine's configuration is missing")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold one JSON object")
        return EngineConfig.from_dict(values), sorted(set(values) & IGNORED_KEYS)

    def with_absolute_paths(self, directory: Path) -> EngineConfig:
        """Relative paths start at `directory`, that of model.json; package: names stay."""

        def absolute(path: str) -> str:
            if path.startswith("package:"):
                return path
            return str(directory.absolute() / Path(path).expanduser())

        tokenizer = self.tokenizer and absolute(self.tokenizer)
        return dataclasses.replace(self, model=absolute(self.model), tokenizer=tokenizer)

    def slo(
        self,
        class_name: str | None = None,
        ttft_slo_ms: float | None = None,
        tbt_slo_ms: float | None = None,
    ) -> SLO:
        """The objectives of a request: each its own, else that of its class, else the model's.

        Raises InvalidParameterError for a class that model.json lacks, and as SLO does.
        """
        if class_name is None:
            ttft_ms, tbt_ms = self.ttft_slo_ms, self.tbt_slo_ms
            return SLO(_first(ttft_slo_ms, ttft_ms) / 1000, _first(tbt_slo_ms, tbt_ms) / 1000)
        chosen = self._slo_class(class_name)
        ttft_ms = _first(ttft_slo_ms, chosen.ttft_slo_ms, self.ttft_slo_ms)
        tbt_ms = _first(tbt_slo_ms, chosen.tbt_slo_ms, self.tbt_slo_ms)
        return SLO(ttft_ms / 1000, tbt_ms / 1000, chosen.name, chosen.rank, chosen.weight)

    def _slo_class(self, name: str) -> SLOClass:
        classes = {c.name: c for c in self.slo_classes}
        if name not in classes:
            known = ", ".join(map(repr, classes))
            limit = f"one of {known}" if known else "left out, as model.json has no slo_classes"
            raise InvalidParameterError("slo_class", name, limit)
        return classes[name]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _error(key: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"model.json: {key}={shorten(repr(value))}: must be {limit}")


def _check_keys(values: Mapping[str, Any], known: Set[str], required: str, place: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"{place}: unknown key {unknown[0]!r}; known: {sorted(known)}")
    if required not in values:
        raise ConfigError(f"{place}: key {required!r} is missing")


def _check_objective(key: str, value: float | None) -> None:
    if value is not None and not 0 < value <= MAX_SLO_S * 1000:
        raise _error(key, value, f"> 0 and <= {MAX_SLO_S * 1000:.0f}")


def _check_types(config: EngineConfig | SLOClass, place: str = "") -> None:
    """Raise ConfigError unless every field has its type; ints pass as floats, bools do not."""
    for name, hint in typing.get_type_hints(type(config)).items():
        _check_type(place + name, getattr(config, name), hint)


def _check_type(key: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise _error(key, value, "one of " + ", ".join(map(str, typing.get_args(hint))))
        return
    is_tuple = typing.get_origin(hint) is tuple  # of any number of one type
    allowed = (tuple,) if is_tuple else typing.get_args(hint) or (hint,)
    if float in allowed:
        allowed += (int,)
    is_stray_bool = isinstance(value, bool) and bool not in allowed
    if is_stray_bool or not isinstance(value, allowed):
        shown = hint.__name__ if isinstance(hint, type) else hint
        raise _error(key, value, f"of type {shown}")
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _check_type(f"{key}[{index}]", item, typing.get_args(hint)[0])
