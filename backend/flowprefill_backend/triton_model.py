"""TritonPythonModel: the three calls that the Triton server makes, and the launcher's stop.

Loads; owns no policy.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from flowprefill.config import EngineConfig
from flowprefill.errors import FlowPrefillError, shorten
from flowprefill.server_log import (
    EXIT_TIMEOUT_VARIABLE,
    GAVE_UP_FILE,
    HTTP_ADDRESS_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_FD_VARIABLE,
    stopped_line,
    stopping_line,
)
from flowprefill.supervision import GAVE_UP
from flowprefill_backend import contract
from flowprefill_backend.claim import Claim
from flowprefill_backend.unload_watch import UnloadWatch, ask_server

if TYPE_CHECKING:
    from flowprefill.stats import EngineInfo
    from flowprefill_backend.instance import Instance
    from flowprefill_backend.metrics_page import MetricsPage


MAX_LOAD_ERROR_CHARS = 4_000
CLOSE_TIMEOUT_S = 5.0


class TritonPythonModel:
    """One instance of a model whose config.pbtxt names this backend."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Complete a pb_utils.ModelConfig; runs in a process of its own."""
        return contract.complete(auto_complete_model_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model. Raises TritonModelException with one line that says what is wrong."""
        try:
            self._instance = load(args)
        except FlowPrefillError as error:
            text = shorten(f"{type(error).__name__}: {error}", MAX_LOAD_ERROR_CHARS)
            raise pb_utils.TritonModelException(text) from error
        self._unload_watch: UnloadWatch | None = None
        if STOP_FD_VARIABLE in os.environ:  # else no launcher of ours has started the server
            self._unload_watch = watch_unload(self._instance, args, os.environ)
            threading.Thread(
                target=follow_stop,
                args=(self._instance, args["model_instance_name"], os.environ),
                name="stop-follower",
                daemon=True,
            ).start()

    def execute(self, requests: list[Any]) -> None:
        """Take over `requests`; their answers go through their response senders."""
        self._instance.execute(requests)

    def finalize(self) -> None:
        """End within bounds; the server waits for it without limit."""
        if self._unload_watch:
            self._unload_watch.close(CLOSE_TIMEOUT_S)
        self._instance.close()


def load(args: Mapping[str, str]) -> Instance:
    """Read config.pbtxt and model.json, load the tokenizer, start the engine."""
    # Here, not above: the auto-completion process needs none of it.
    from flowprefill.engine_process import EngineClient
    from flowprefill.tokenizer import load_tokenizer
    from flowprefill_backend.instance import Instance

    log = pb_utils.Logger
    model_config = json.loads(args["model_config"])
    contract.check(model_config, args["model_instance_kind"])
    # The server calls the model's own directory its repository.
    version_dir = Path(args["model_repository"]) / args["model_version"]
    config, without_effect = EngineConfig.from_file(version_dir / "model.json")
    config = config.with_absolute_paths(version_dir)
    for key in without_effect:
        log.log_info(f"[flowprefill] model.json: {key} has no effect here")
    checks_health = contract.flag(model_config, "ENABLE_VLLM_HEALTH_CHECK")
    tokenizer = load_tokenizer(config)
    # Meanwhile the engine loads.
    warming_up = threading.Thread(target=tokenizer.warm_up, name="tokenizer")
    warming_up.start()
    try:
        return Instance(
            config,
            tokenizer,
            lambda on_output: EngineClient(config, on_output, line_logger(log, os.environ)),
            log,
            unload=(lambda: pb_utils.unload_model(args["model_name"])) if checks_health else None,
            make_page=lambda info: open_page(args, model_config, config, info),
            claim=make_claim(args, os.environ),
        )
    finally:
        warming_up.join()


def make_claim(args: Mapping[str, str], environ: Mapping[str, str]) -> Claim | None:
    """None if no launcher of ours has started the server."""
    if RUN_DIR_VARIABLE not in environ:
        return None
    return Claim(Path(environ[RUN_DIR_VARIABLE]), args["model_name"], args["model_version"])


def open_page(
    args: Mapping[str, str], model_config: Mapping[str, Any], config: EngineConfig, info: EngineInfo
) -> MetricsPage | None:
    """The model's series on the server's metrics page; None if they are not wanted or cannot be."""
    from flowprefill_backend import metric_families as families
    from flowprefill_backend.metrics_page import MetricsPage

    if not contract.flag(model_config, "REPORT_CUSTOM_METRICS", default=True):
        return None
    label_values = {
        families.SLO_CLASS: (
            families.NO_CLASS,
            *(slo_class.name for slo_class in config.slo_classes),
            families.UNKNOWN_CLASS,
        ),
        families.REASON: families.REJECT_REASONS,
    }
    try:
        return MetricsPage(
            families.make_families(
                info.max_model_len,
                for_orca=contract.flag(model_config, "REPORT_ORCA_METRICS", default=True),
            ),
            {"model": args["model_name"], "version": args["model_version"]},
            label_values,
        )
    except pb_utils.TritonModelException as error:  # for one, a server built without metrics
        pb_utils.Logger.log_warn(f"[flowprefill] the model has no metrics: {error}")
        return None


def watch_unload(
    instance: Instance, args: Mapping[str, str], environ: Mapping[str, str]
) -> UnloadWatch:
    """Bound how long an unload or a reload waits for requests by the launcher's exit timeout."""
    log, name = pb_utils.Logger, args["model_instance_name"]
    return UnloadWatch(
        instance,
        partial(
            ask_server, environ[HTTP_ADDRESS_VARIABLE], args["model_name"], args["model_version"]
        ),
        float(environ[EXIT_TIMEOUT_VARIABLE]),
        lambda why, n: log.log_warn(f"[flowprefill] {name}: {why}, requests cut short: {n}"),
    )


def follow_stop(instance: Instance, name: str, environ: Mapping[str, str]) -> None:
    """Wait until the launcher stops the server, then stop `instance` and report how that went.

    tritonserver itself says nothing to a model before the last of its requests has ended.
    """
    poll = select.poll()
    poll.register(int(environ[STOP_FD_VARIABLE]), select.POLLIN)
    if not all(events & select.POLLIN for _, events in poll.poll()):
        return  # the launcher has died without a word; the server goes on
    log = pb_utils.Logger
    instance.refuse_new()
    log.log_info(stopping_line(name))
    num_cut_short = instance.drain(float(environ[EXIT_TIMEOUT_VARIABLE]))
    (log.log_warn if num_cut_short else log.log_info)(stopped_line(name, num_cut_short))


def line_logger(log: Any, environ: Mapping[str, str]) -> Callable[[str], None]:
    """Logs what the engine and its supervision say; the launcher also finds it if they gave up."""

    def write(line: str) -> None:
        if GAVE_UP not in line:
            log.log_info(f"[flowprefill] {line}")
            return
        log.log_error(f"[flowprefill] {line}")
        try:
            if RUN_DIR_VARIABLE in environ:
                (Path(environ[RUN_DIR_VARIABLE]) / GAVE_UP_FILE).touch()
        except OSError as error:
            log.log_error(f"[flowprefill] the launcher cannot know of it: {error}")

    return write
