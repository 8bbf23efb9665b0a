"""Watch: what the server's processes hold over time, and whether it stays flat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from flowprefill.bench.soak.rig import Holdings, SoakServer

_MIN_SAMPLES = 30
"""Of a process that is judged. An engine that is killed after seconds has hardly loaded."""
_MB = 2**20


@dataclass
class Watch:
    """Samples of each process, and of /dev/shm."""

    processes: dict[tuple[str, int], list[Holdings]] = field(default_factory=dict)
    """(Role, process id) -> what it held at each look."""
    shm: list[int] = field(default_factory=list)

    def sample(self, server: SoakServer) -> None:
        for key, holdings in server.holdings().items():
            self.processes.setdefault(key, []).append(holdings)
        self.shm.append(server.shm_bytes())

    def growth(self) -> dict[str, float]:
        """By role, and for /dev/shm: the largest growth of a process's memory, as a share."""
        found = self._largest(lambda held: held.resident_bytes, growth)
        if len(self.shm) >= _MIN_SAMPLES:
            found["/dev/shm"] = growth(self.shm)
        return found

    def more_files(self) -> dict[str, float]:
        """By role: how many more files and connections a process has open in the end."""
        return self._largest(lambda held: held.num_files, increase)

    def more_threads(self) -> dict[str, float]:
        """By role: how many more threads a process has in the end."""
        return self._largest(lambda held: held.num_threads, increase)

    def megabytes(self) -> dict[str, float]:
        """The last size of each role's last process."""
        last = {role: seen[-1].resident_bytes / _MB for (role, _), seen in self.processes.items()}
        return {**last, "/dev/shm": self.shm[-1] / _MB}

    def _largest(
        self, of: Callable[[Holdings], int], compare: Callable[[Sequence[int]], float]
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        for (role, _), seen in self.processes.items():
            if len(seen) >= _MIN_SAMPLES:
                change = compare([of(held) for held in seen])
                found[role] = max(found.get(role, change), change)
        return found


def growth(sizes: Sequence[int]) -> float:
    """The last tenth over that behind the warm-up, minus 1."""
    before, after = _ends(sizes)
    return after / before - 1


def increase(counts: Sequence[int]) -> float:
    """The last tenth minus that behind the warm-up."""
    before, after = _ends(counts)
    return after - before


def _ends(samples: Sequence[int]) -> tuple[float, float]:
    """Medians of the first tenth behind the warm-up, which is a third, and of the last tenth."""
    third, tenth = len(samples) // 3, len(samples) // 10
    return median(samples[third : third + tenth]), median(samples[-tenth:])
