"""LaunchWindow: how far slices are launched ahead of an asynchronous device. Pure: no torch.

Launching ahead hides launch cost, and is also what delays a preemption, so predicted work in flight
is bounded. The bound scales with the error of the predictions and no more: where slices take a
quarter longer than predicted, so does what is in flight. Nothing is corrected here by measured
times: predictions come from a profile of this device, and slices of max_slice / 2 leave room for
errors of a third before a newcomer waits twice max_slice.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol


class DeviceEvent(Protocol):
    """The end of a slice; the part of torch.cuda.Event that is used."""

    def query(self) -> bool:
        """Whether it has come."""
        ...

    def synchronize(self) -> None:
        """Wait for it, and for nothing launched later."""
        ...


class LaunchWindow:
    """The slices in flight, in order.

    At most max_slice of work is in flight when a slice is launched, or one slice if that is longer;
    so in flight <= max_slice + one slice. make_room waits only while another slice is in flight
    behind the one it waits for, so the device has work when it returns from waiting: it idles only
    where launching a slice takes longer than what is in flight.
    """

    def __init__(self, max_slice_s: float) -> None:
        self._max_slice_s = max_slice_s
        self._in_flight: deque[tuple[DeviceEvent, float]] = deque()

    @property
    def in_flight_s(self) -> float:
        """Predicted seconds of the slices not known to have ended."""
        return sum(seconds for _, seconds in self._in_flight)

    @property
    def newest(self) -> DeviceEvent | None:
        """End of the slice launched last; None if all are known to have ended."""
        return self._in_flight[-1][0] if self._in_flight else None

    def make_room(self) -> None:
        """Forget slices that have ended; wait for the oldest ones while too much is in flight."""
        self.forget_ended()
        while len(self._in_flight) > 1 and self.in_flight_s > self._max_slice_s:
            self._in_flight.popleft()[0].synchronize()

    def forget_ended(self) -> None:
        """Without waiting."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()

    def launched(self, event: DeviceEvent, predicted_s: float) -> None:
        """Note a slice whose end `event` marks."""
        self._in_flight.append((event, predicted_s))

    def wait(self) -> None:
        """Wait for everything in flight."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()
