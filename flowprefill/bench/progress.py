"""The progress bar of a benchmark, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class BenchProgress:
    """What is being done, and how much of it is done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def show_loading(self, stage: str, fraction: float) -> None:
        """What an engine calls while it loads."""
        self.describe(f"loading: {stage} {fraction:.0%}")

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def expect(self, num_more: float) -> None:
        """About so many steps are to come; if more come, the total grows with them."""
        (task,) = self._progress.tasks
        self._progress.update(self._task, total=task.completed + num_more)

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)
        (task,) = self._progress.tasks
        if task.total is not None and task.completed > task.total:
            self._progress.update(self._task, total=task.completed)

    def advance_to(self, done: float) -> None:
        self._progress.update(self._task, completed=done)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """One step of the total, called `text`."""
        self.describe(text)
        yield
        self.advance()


@contextlib.contextmanager
def bench_progress(total: float | None) -> Iterator[BenchProgress]:
    """A bar of `total` steps; None: nobody knows how many. Drawn seldom: the engine needs the
    processors."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield BenchProgress(progress, progress.add_task("", total=total))
