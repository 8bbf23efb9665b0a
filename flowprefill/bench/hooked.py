"""The model of a benchmark by its program: our own operators, or transformers' model, hooked."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flowprefill.bench.servers import sigterm_raises
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.programs.model_spec import resolve_model_path

PROGRAMS = ("native", "hooks", "both")
"""What a benchmark can be asked for; both = beside each other."""


@contextlib.contextmanager
def by_program(config: EngineConfig, program: str | None) -> Iterator[dict[str, EngineConfig]]:
    """The configurations to measure, by the names of their programs.

    program: one of PROGRAMS; None = what the configuration says, with no name of its own
    Raises ConfigError for another one, and as `hooked` does.
    """
    if program is None:
        yield {"": config}
        return
    if program not in PROGRAMS:
        raise ConfigError(f"--program {program}: must be one of {', '.join(PROGRAMS)}")
    with contextlib.ExitStack() as stack:
        configs = {}
        if program != "hooks":
            configs["native"] = dataclasses.replace(config, program="native")
        if program != "native":
            configs["hooks"] = stack.enter_context(hooked(config))
        yield configs


@contextlib.contextmanager
def hooked(config: EngineConfig) -> Iterator[EngineConfig]:
    """The same model as a hooked one; what a GGUF file holds is a Hugging Face folder meanwhile.

    Raises UnsupportedArchitectureError if transformers or greenlet is missing.
    """
    from flowprefill.hooks.availability import check_packages

    path = resolve_model_path(config.model)
    check_packages(path)
    if path.is_dir():
        yield dataclasses.replace(config, program="hooks")
        return
    from flowprefill.bench.peers.export_hf import export

    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="flowprefill-hooked-") as folder:
        export(path, Path(folder))
        yield dataclasses.replace(config, program="hooks", model=folder)
