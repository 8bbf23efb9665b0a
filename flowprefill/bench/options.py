"""Options that several benchmarks have, and the configuration that they lead to."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated

import typer

from flowprefill.bench.report import BenchmarkError, load_model_json
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError


def finite(value: float | None) -> float | None:
    """Callback of every option that is a float: their min and max let NaN and infinity through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number.")
    return value


ModelJson = Annotated[
    Path | None, typer.Option(help="Engine configuration; default: that of smollm2.")
]
Seed = Annotated[int, typer.Option(help="Seed of all that is drawn.")]
JsonOut = Annotated[Path | None, typer.Option(help="Write the JSON line here too.")]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16 or float32, whatever the configuration says.")
]
PeerOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME=PYTHON[:MODEL]",
        help="An engine to measure beside ours: openvino, vllm or transformers, the interpreter "
        "that has it, and its model folder. May be repeated.",
    ),
]
Trace = Annotated[Path, typer.Option(help="Trace CSV.")]
Blocks = Annotated[
    int, typer.Option(min=1, help="Blocks of requests that the intervals are taken over.")
]
LengthDivisor = Annotated[
    float,
    typer.Option(
        min=0.01, callback=finite, help="Prompts are so many times shorter, and chunks too."
    ),
]
OutputTokens = Annotated[
    int, typer.Option(min=1, help="Tokens that each request generates; 1 = prefill only.")
]
Records = Annotated[
    Path | None,
    typer.Option(help="File of outcomes; what is in it already is not measured again."),
]
PeersFile = Annotated[
    Path | None, typer.Option(help="JSON list of engines to measure beside ours.")
]


def load_config(model_json: Path | None, dtype: str | None) -> EngineConfig:
    """The configuration to measure. Raises ConfigError for a dtype that no engine has."""
    config = load_model_json(model_json)
    if dtype is None:
        return config
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: must be bfloat16 or float32")
    return dataclasses.replace(config, dtype=dtype)  # type: ignore[arg-type]


def prompt_tokens(asked: int, max_model_len: int) -> int:
    """Tokens of a prompt of the length asked for: one less where nothing would fit behind it.

    Raises BenchmarkError if it is longer than the model takes.
    """
    if asked > max_model_len:
        raise BenchmarkError(f"a prompt of {asked} tokens: max_model_len is {max_model_len}")
    return min(asked, max_model_len - 1)
