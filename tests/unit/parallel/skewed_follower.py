"""What a rank runs in tests that want it late: a millisecond before about every other slice."""

from __future__ import annotations

import random
import time

from flowprefill.follower import main

SKEW_S = 1e-3


def maybe_wait(draw: random.Random) -> None:
    if draw.random() < 0.5:
        time.sleep(SKEW_S)


if __name__ == "__main__":
    source = random.Random()
    main(before_slice=lambda: maybe_wait(source))
