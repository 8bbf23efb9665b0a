"""Load shapes: how many users there are when, chosen by --shape. Without one, -u and -r hold.

Both take the most users from -u and the length of the test from -t.
"""

from __future__ import annotations

from locust import LoadTestShape, User
from locust.env import Environment
from reporting import options
from traffic import CHAT

DEFAULT_RUN_TIME_S = 300


class Shape(LoadTestShape):
    """What the shapes share: the options."""

    abstract = True
    use_common_options = True  # the web UI goes on asking for users and time

    @property
    def environment(self) -> Environment:
        """Locust's, with the options and the classes of users."""
        assert self.runner is not None, "the shape was not given to locust"
        return self.runner.environment

    @property
    def max_users(self) -> int:
        """-u."""
        return options(self.environment).num_users or 1

    @property
    def progress(self) -> float:
        """Share of the test that is over; 1 or more at its end."""
        run_time_s: float = options(self.environment).run_time or DEFAULT_RUN_TIME_S
        return self.get_run_time() / run_time_s  # type: ignore[no-any-return, no-untyped-call]


class Ramp(Shape):
    """Five equal steps up to -u users, to see where attainment breaks off."""

    NUM_STEPS = 5

    def tick(self) -> tuple[int, float] | None:
        """Users there should be now and spawn rate; None at the end."""
        if self.progress >= 1:
            return None
        step = 1 + int(self.NUM_STEPS * self.progress)
        num_users = max(1, round(self.max_users * step / self.NUM_STEPS))
        return num_users, options(self.environment).spawn_rate or 1.0


class Burst(Shape):
    """A third of -u users; in the middle third of the test chat users make up the rest at once.

    Shows whether chat stays in time beside the documents.
    """

    def tick(self) -> tuple[int, float, list[type[User]]] | None:
        """Users there should be now, spawn rate, and what classes to spawn; None at the end."""
        if self.progress >= 1:
            return None
        classes = self.environment.user_classes
        chat = [user for user in classes if getattr(user, "traffic", None) is CHAT]
        at_once = min(100.0, self.max_users)  # beyond that locust warns of its own limits
        if 1 <= 3 * self.progress < 2 and chat:
            return self.max_users, at_once, chat
        return max(1, self.max_users // 3), at_once, classes


SHAPES: dict[str, type[Shape]] = {"ramp": Ramp, "burst": Burst}
