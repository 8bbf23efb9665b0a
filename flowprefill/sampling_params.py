"""SamplingParams under vLLM's names: parsing, coercion, range checks. No torch.

Values may arrive as text ("0.1", "20", "false", '["a"]'): Triton clients send them so. null means
the default. Numbers are numbers (true is not 1), 20.0 is the integer 20, and 20.5 is refused.
Unknown keys, wrong types and out-of-range values raise InvalidParameterError. What vLLM has and
FlowPrefill has not (UNSUPPORTED_FEATURES) raises UnsupportedFeatureError, unless the value asks for
nothing, as n=1 does.

Where vLLM and FlowPrefill could be thought to differ:

| parameter          | here                                                                   |
|--------------------|------------------------------------------------------------------------|
| max_tokens         | null is 16, as if absent (vLLM: up to the model's limit)               |
| temperature        | 0 < t < 0.01 becomes 0.01, as in vLLM; above 100 is refused            |
| top_k              | -1 and 0 both mean off; more than the vocabulary means off             |
| seed               | -1 means none, as in vLLM; other negative values are seeds             |
| stop               | a text that is a JSON list of strings is that list, any other text is  |
|                    | one stop string ("[1]" too); at most 32 of at most 1,024 characters    |
| logit_bias         | values outside [-100, 100] are refused (vLLM's OpenAI server clips)    |
| repetition_penalty | in [0.01, 100]: nearer to 0 the logits overflow                        |
| logprobs           | 0..20; -1 (all) is refused                                             |
| output_kind        | the `stream` input decides; any value but null is unsupported          |
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowprefill.errors import InvalidParameterError, UnsupportedFeatureError

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1_024
MAX_TOKEN_IDS = 1_024
"""Entries of stop_token_ids and of logit_bias at most."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0; smaller ones are raised to it (vLLM does the same)."""

UNSUPPORTED_FEATURES: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "guided_decoding": (),
    "structured_outputs": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "output_kind": (),
    "output_text_buffer_length": (0,),
    "flat_logprobs": (False,),
    "skip_reading_prefix_cache": (False,),
    "extra_args": ({},),
    "lora_name": ("",),
}
"""Parameters of vLLM 0.6 to 0.11 that FlowPrefill lacks -> values that ask for nothing. So does
null."""

_REQUEST_KEYS = ("ttft_slo_ms", "tbt_slo_ms", "slo_class", "tenant", "cancel_id")
"""Keys beside the sampling parameters, taken out before from_mapping; only suggested here."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MAX_NUMBER_CHARS = 64
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class _Range:
    """Allowed numbers; `str()` is the limit that error messages name."""

    low: float
    high: float
    is_integer: bool = False
    excludes_low: bool = False

    def contains(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(
            value, int if self.is_integer else int | float
        ):
            return False
        # Comparisons refuse NaN and infinity too, and are exact for integers of any size.
        return self.low <= value <= self.high and not (self.excludes_low and value == self.low)

    def coerce(self, field_name: str, value: object) -> Any:
        """`value` (a number or its text) as int or float. Raises InvalidParameterError."""
        number = _parse_number(value)
        if self.is_integer and isinstance(number, float) and number.is_integer():
            number = int(number)
        if number is None or not self.contains(number):
            raise InvalidParameterError(field_name, value, str(self))
        return number if self.is_integer else float(number)

    def __str__(self) -> str:
        kind = "an integer" if self.is_integer else "a number"
        bracket = "(" if self.excludes_low else "["
        return f"{kind} in {bracket}{self.low}, {self.high}]"


_INT32_MAX = 2**31 - 1
_RANGES = {
    "max_tokens": _Range(1, _INT32_MAX, is_integer=True),
    "min_tokens": _Range(0, _INT32_MAX, is_integer=True),
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, excludes_low=True),
    "top_k": _Range(-1, _INT32_MAX, is_integer=True),
    "min_p": _Range(0, 1),
    "seed": _Range(-(2**63), 2**63 - 1, is_integer=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0.01, 100),
    "logprobs": _Range(0, 20, is_integer=True),
}
_TOKEN_ID = _Range(0, _INT32_MAX, is_integer=True)
_BIAS = _Range(-100, 100)
_STOP_LIMIT = (
    f"at most {MAX_STOP_STRINGS} non-empty Unicode strings of at most {MAX_STOP_CHARS} characters"
)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when the answer ends; names and defaults are vLLM's.

    Raises InvalidParameterError naming field, value and limit.
    """

    max_tokens: int = 16
    """Tokens to generate at most; >= 1."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor a stop token may be chosen; 0..max_tokens."""
    temperature: float = 1.0
    """0 = greedy; in [0, 100]."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 or -1 = off; else >= 1."""
    min_p: float = 0.0
    """In [0, 1]."""
    seed: int | None = None
    """Fixes the draw of this request whatever else runs; None or -1 = drawn by the engine."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; not emitted unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    """In [-2, 2]."""
    frequency_penalty: float = 0.0
    """In [-2, 2]."""
    repetition_penalty: float = 1.0
    """In [0.01, 100]; 1 = off."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit; values in [-100, 100]."""
    logprobs: int | None = None
    """Number of most likely tokens to report per position; None = off; 0..20."""

    def __post_init__(self) -> None:
        for name, limits in _RANGES.items():
            value = getattr(self, name)
            if not (value is None and name in _NULLABLE) and not limits.contains(value):
                raise InvalidParameterError(name, value, str(limits))
        for name in _BOOLEAN_FIELDS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "true or false")
        if self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens={self.max_tokens}"
            raise InvalidParameterError("min_tokens", self.min_tokens, limit)
        _check_stop(self.stop)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("logit_bias", self.logit_bias)
        for token_id, bias in self.logit_bias.items():
            if not _BIAS.contains(bias):
                raise InvalidParameterError(f"logit_bias[{token_id}]", bias, str(_BIAS))
        self._normalize()

    def _normalize(self) -> None:
        """Give every meaning one value: clamp the temperature, drop the spellings of "off"."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    @staticmethod
    def from_mapping(
        values: Mapping[str, Any], *, vocab_size: int, ignore_unknown: bool = False
    ) -> SamplingParams:
        """Build from a client's keys and values; see the module's text for what is accepted.

        vocab_size bounds the token ids. ignore_unknown passes over keys that are no sampling
        parameter (request parameters mix with others). Raises InvalidParameterError and
        UnsupportedFeatureError, naming the field.
        """
        if not isinstance(values, Mapping):
            raise InvalidParameterError("sampling_parameters", values, "a JSON object")
        fields = {}
        for key, value in values.items():
            if key in UNSUPPORTED_FEATURES:
                if not _asks_for_nothing(value, UNSUPPORTED_FEATURES[key]):
                    raise UnsupportedFeatureError(key, value)
            elif key in _FIELDS:
                if value is not None:
                    fields[key] = _coerce(key, value)
            elif not ignore_unknown:
                raise _unknown_key(key, value)
        params = SamplingParams(**fields)
        params.check_vocab(vocab_size)
        return params

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidParameterError if a token id lies outside the vocabulary."""
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(self, name):
                if token_id >= vocab_size:
                    limit = f"a token id, an integer in [0, {vocab_size - 1}]"
                    raise InvalidParameterError(name, token_id, limit)

    def to_wire(self) -> dict[str, Any]:
        wire = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Pairs: msgpack refuses maps whose keys are integers.
        wire["logit_bias"] = list(self.logit_bias.items())
        return wire

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> SamplingParams:
        fields = dict(wire)
        fields["stop"] = tuple(fields["stop"])
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
        fields["logit_bias"] = dict(fields["logit_bias"])
        return SamplingParams(**fields)


_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_NULLABLE = ("seed", "logprobs")
_BOOLEAN_FIELDS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOP_STRINGS:
        raise InvalidParameterError("stop", stop, _STOP_LIMIT)
    for text in stop:
        if not (isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS and is_unicode(text)):
            raise InvalidParameterError("stop", text, _STOP_LIMIT)


def is_unicode(text: str) -> bool:
    """False for text with lone surrogates, which JSON escapes can make and no token can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_token_ids(field_name: str, token_ids: object) -> None:
    if not isinstance(token_ids, tuple | dict) or len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidParameterError(field_name, token_ids, f"at most {MAX_TOKEN_IDS} token ids")
    for token_id in token_ids:
        if not _TOKEN_ID.contains(token_id):
            raise InvalidParameterError(field_name, token_id, f"a token id, {_TOKEN_ID}")


def _coerce(field_name: str, value: object) -> Any:
    """A client's value as the type of its field."""
    if field_name in _RANGES:
        return _RANGES[field_name].coerce(field_name, value)
    if field_name in _BOOLEAN_FIELDS:
        return _coerce_bool(field_name, value)
    if field_name == "stop":
        return _coerce_stop(value)
    parsed = _parse_json(value)
    if field_name == "stop_token_ids" and isinstance(parsed, list | tuple):
        return tuple(_TOKEN_ID.coerce(field_name, item) for item in parsed)
    if field_name == "logit_bias" and isinstance(parsed, Mapping):
        return {
            (token_id := _TOKEN_ID.coerce(field_name, key)): _BIAS.coerce(
                f"logit_bias[{token_id}]", bias
            )
            for key, bias in parsed.items()
        }
    shape = "a map from token ids to numbers" if field_name == "logit_bias" else "a list of ids"
    raise InvalidParameterError(field_name, value, shape)


def _coerce_bool(field_name: str, value: object) -> bool:
    parsed = _parse_bool(value)
    if parsed is None:
        raise InvalidParameterError(field_name, value, "true or false")
    return parsed


def _coerce_stop(value: object) -> tuple[Any, ...]:
    if isinstance(value, str):
        parsed = _parse_json(value)
        is_list = isinstance(parsed, list) and all(isinstance(item, str) for item in parsed)
        return tuple(parsed) if is_list else (value,)
    if not isinstance(value, list | tuple):
        raise InvalidParameterError("stop", value, _STOP_LIMIT)
    return tuple(value)


def _parse_number(value: object) -> int | float | None:
    """A number, or the number that a text writes; None if it is neither."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
            return None
        # By way of int where possible: a seed of 19 digits does not survive a float.
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _parse_bool(value: object) -> bool | None:
    """True, false, 1, 0, or the text of one of them, in any case; None if it is neither."""
    return _BOOLEANS.get(str(value).strip().lower()) if isinstance(value, str | int) else None


def _parse_json(value: object) -> Any:
    """The value that a JSON text writes; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    for candidate in neutral:
        if isinstance(candidate, bool):
            parsed: object = _parse_bool(value)
        elif isinstance(candidate, int | float):
            parsed = _parse_number(value)
        else:
            parsed = _parse_json(value)
        if parsed == candidate:
            return True
    return False


def _unknown_key(key: object, value: object) -> InvalidParameterError:
    name = str(key)[:64]
    known = (*_FIELDS, *UNSUPPORTED_FEATURES, *_REQUEST_KEYS)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    # The name is a client's: repr, because it may hold what no message can (lone surrogates).
    return InvalidParameterError(repr(name), value, f"left out: no such parameter{hint}")
