"""Calls made one after another in a thread of their own, which Python's exit does not wait for."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Event, Thread

from torch import Tensor


@dataclass(slots=True, eq=False)
class Call:
    """A call that waits for its turn, is being made, or is over."""

    work: Callable[[], Tensor]
    future: "Future[Tensor]" = field(default_factory=Future)
    begun: Event = field(default_factory=Event)  # set also where it never will, for it was given up
    began: float = 0.0  # on the monotonic clock


class OneThread:
    """Makes one call at a time.

    The thread is a daemon, unlike those of `concurrent.futures`: a call that hangs does not keep the process.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: deque[Call] = deque()
        self._changed = Condition()
        self._closed = False
        Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, work: Callable[[], Tensor], *, next_in_line: bool = False) -> Call:
        """Queues a call, behind the others or before them."""
        call = Call(work)
        with self._changed:
            (self._calls.appendleft if next_in_line else self._calls.append)(call)
            self._changed.notify()
        return call

    def close(self) -> None:
        """Gives up the calls that wait; the thread ends once the one in work returns."""
        with self._changed:
            self._closed = True
            for call in self._calls:
                call.future.cancel()
                call.begun.set()
            self._calls.clear()
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                call = self._calls.popleft()
            if call.future.set_running_or_notify_cancel():
                call.began = time.monotonic()
                call.begun.set()
                try:
                    call.future.set_result(call.work())
                except BaseException as error:
                    call.future.set_exception(error)
