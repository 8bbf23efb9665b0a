"""Watch: memory of the server's processes over time, and whether it stays flat."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from flowprefill.bench.soak.rig import SoakServer

_MIN_SAMPLES = 30
"""Of a process that is judged. An engine that is killed after seconds has hardly loaded."""


@dataclass
class Watch:
    """Samples of resident memory by process, and of /dev/shm."""

    resident: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    shm: list[int] = field(default_factory=list)

    def sample(self, server: SoakServer) -> None:
        for key, size in server.resident_bytes().items():
            self.resident.setdefault(key, []).append(size)
        self.shm.append(server.shm_bytes())

    def growth(self) -> dict[str, float]:
        """By role, and for /dev/shm: the largest growth of a process after its warm-up."""
        found: dict[str, float] = {}
        for (role, _), sizes in self.resident.items():
            if len(sizes) >= _MIN_SAMPLES:
                found[role] = max(found.get(role, 0.0), growth(sizes))
        if len(self.shm) >= _MIN_SAMPLES:
            found["/dev/shm"] = growth(self.shm)
        return found

    def megabytes(self) -> dict[str, float]:
        """The last size of each role's last process."""
        last = {role: sizes[-1] / 2**20 for (role, _), sizes in self.resident.items()}
        return {**last, "/dev/shm": self.shm[-1] / 2**20}


def growth(sizes: list[int]) -> float:
    """The last third's median over the middle third's, minus 1; the first third is warm-up."""
    third = len(sizes) // 3
    before, after = median(sizes[third : 2 * third]), median(sizes[2 * third :])
    return after / before - 1
