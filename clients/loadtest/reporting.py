"""Reporting: TTFT, TBT and attainment in locust's tables, web UI, CSV files and closing summary.

TTFT and TBT are rows of their own beside the requests (`chat`, `chat TTFT`, `chat TBT`). They are
logged without an event, so that locust's totals and charts go on counting requests, not tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flask
import rich.box
from attainment import Answer
from locust.env import Environment
from locust.runners import WorkerRunner
from locust.web import WebUI
from rich.console import Console
from rich.table import Table
from scoreboard import COLUMNS, Scoreboard, to_csv
from traffic import TrafficClass

TAB = "slo"
"""Key of the web UI's tab and of its rows."""


def options(environment: Environment) -> Any:
    """Of the command line, as changed in the web UI."""
    assert environment.parsed_options is not None, "locust runs as a command"
    return environment.parsed_options


class SloReport:
    """What one locust process knows of its requests; a master knows those of its workers."""

    def __init__(self, environment: Environment, classes: Sequence[TrafficClass]) -> None:
        self.scoreboard = Scoreboard(classes)
        self._environment = environment
        events = environment.events
        events.test_start.add_listener(self._start)
        events.reset_stats.add_listener(self._start)
        if environment.reset_stats:  # locust then starts anew without that event
            events.spawning_complete.add_listener(self._start)
        events.report_to_master.add_listener(self._send)
        events.worker_report.add_listener(self._receive)
        if not isinstance(environment.runner, WorkerRunner):  # its master sums up for it
            events.quit.add_listener(self._summarise)
        if environment.web_ui is not None:
            add_tab(environment.web_ui, self)

    def finished(self, traffic: TrafficClass, protocol: str, answer: Answer) -> None:
        """A request was answered or failed."""
        self.scoreboard.finished(traffic, answer)
        if answer.ttft_ms is not None:
            self._log(f"{traffic.name} TTFT", protocol, answer.ttft_ms)
        for gap_ms in answer.tbt_ms:
            self._log(f"{traffic.name} TBT", protocol, gap_ms)

    def rows(self) -> list[dict[str, str]]:
        """The table of attainment as it is now."""
        stats = self._environment.stats
        return self.scoreboard.rows((stats.last_request_timestamp or 0.0) - stats.start_time)

    def _log(self, name: str, protocol: str, duration_ms: float) -> None:
        # Declared as int; locust's own users pass floats too.
        self._environment.stats.get(name, protocol).log(duration_ms, 0)  # type: ignore[arg-type]

    def _start(self, **_: Any) -> None:
        self.scoreboard.reset()
        self.scoreboard.slo_scale = options(self._environment).slo_scale

    def _send(self, data: dict[str, Any], **_: Any) -> None:
        data[TAB] = self.scoreboard.take()

    def _receive(self, data: dict[str, Any], **_: Any) -> None:
        self.scoreboard.merge(data[TAB])

    def _summarise(self, **_: Any) -> None:
        """The last word of a run, after locust's own tables, and a file beside its files."""
        rows = self.rows()
        table = Table(title="SLO attainment", box=rich.box.SIMPLE_HEAD)
        for title in COLUMNS.values():
            table.add_column(title, justify="left" if title == COLUMNS["name"] else "right")
        for row in rows:
            table.add_row(*(row[key] for key in COLUMNS))
        Console(width=110).print(table)
        prefix = options(self._environment).csv_prefix
        if prefix:
            Path(f"{prefix}_slo.csv").write_text(to_csv(rows), encoding="utf-8")


def add_tab(web_ui: WebUI, report: SloReport) -> None:
    """A tab with the table of attainment, and a link to it as CSV."""
    app = web_ui.app
    assert app is not None, "a web UI has its app from the start"
    structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "SLO attainment", "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
        "extended_csv_files": [{"href": "./slo/csv", "title": "Download SLO attainment CSV"}],
    }

    @app.after_request
    def add_rows(response: flask.Response) -> flask.Response:
        """The page asks for this reply every two seconds and takes the rows of our tab from it."""
        if flask.request.endpoint == "locust.request_stats" and response.is_json:
            stats = response.get_json()
            stats["extended_stats"] = [{"key": TAB, "data": report.rows()}]
            response.set_data(json.dumps(stats))
        return response

    @app.route(f"{options(web_ui.environment).web_base_path or ''}/slo/csv")
    @web_ui.auth_required_if_enabled
    def slo_csv() -> flask.Response:
        headers = {"Content-Disposition": "attachment; filename=slo.csv"}
        return flask.Response(to_csv(report.rows()), mimetype="text/csv", headers=headers)
