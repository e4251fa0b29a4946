"""Streams with threads of their own, events, a current stream per thread, and waits of the host.

No tensor enters here: a kernel is a function without arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import queue
import random
import sys
import threading
import time
import traceback
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ranks.run import rank

Kernel = Callable[[], object]

DEVICE_TYPE = 20
"""PrivateUse1, as torch numbers the types of devices."""
PLACES = 1000
"""How many of a thread's last waits are remembered with their place."""
LONGEST_PAUSE = 0.002
"""Seconds that a fuzzed kernel is held back at most."""


class KernelError(RuntimeError):
    """A kernel has failed; raised at the host's next wait, whatever it waits for."""


# ---------------------------------------------------------------- pauses


class _Fuzz:
    """Which kernels are held back: the same ones for the same seed, rank and stream."""

    def __init__(self, seed: str | None) -> None:
        self._seed = seed

    def pauses(self, stream: int) -> Iterator[float]:
        if not self._seed:
            return itertools.repeat(0.0)
        numbers = random.Random(f"{self._seed} {rank()} {stream}")
        draw = numbers.random
        return (draw() * LONGEST_PAUSE if draw() < 0.1 else 0.0 for _ in itertools.count())


_fuzz = _Fuzz(os.environ.get("LAG_FUZZ"))


def fuzz(seed: int | str | None) -> None:
    """From now on some kernels begin late, at random; None ends that."""
    global _fuzz
    _fuzz = _Fuzz(None if seed is None else str(seed))


# ---------------------------------------------------------------- what kernels leave behind

_errors: deque[tuple[str, Exception]] = deque()


def _raise_error() -> None:
    if _errors:
        stream, error = _errors.popleft()
        _errors.clear()
        raise KernelError(f"a kernel on {stream} failed: {error}") from error


def _work(kernels: queue.SimpleQueue[Kernel | None], number: int) -> None:
    """A stream's thread: one kernel after the other, until there are no more."""
    name, pauses, fuzzed = f"lag-stream-{number}", _fuzz.pauses(number), _fuzz
    with torch.inference_mode():
        while (kernel := kernels.get()) is not None:
            if fuzzed is not _fuzz:
                pauses, fuzzed = _fuzz.pauses(number), _fuzz
            if pause := next(pauses):
                time.sleep(pause)
            try:
                kernel()
            except Exception as error:
                traceback.print_exc()
                _errors.append((name, error))
            kernel = None  # what it held may go before the next one comes


# ---------------------------------------------------------------- the host's waits

_waits: defaultdict[int, int] = defaultdict(int)
_places: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=PLACES))
_HERE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)


def _place(depth: int = 4) -> str:
    """The innermost calls that are neither torch's nor the device's own."""
    frame: Any = sys._getframe(2)
    calls: list[str] = []
    while frame is not None and len(calls) < depth:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, _TORCH)):
            calls.append(f"{os.path.basename(file)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(calls)


def host_waits(thread_ident: int | None = None) -> int:
    """How often this thread, or the one named, has waited for the device."""
    return _waits[threading.get_ident() if thread_ident is None else thread_ident]


def host_wait_places(thread_ident: int | None = None) -> list[str]:
    """Where it did so, the last ones: each place with its callers."""
    return list(_places[threading.get_ident() if thread_ident is None else thread_ident])


# ---------------------------------------------------------------- events


class _Mark:
    """One recording of an event: a point in a stream's queue."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time = 0.0

    def __call__(self) -> None:
        self.time = time.perf_counter()
        self.reached.set()

    def wait_on_host(self) -> None:
        me = threading.get_ident()
        _waits[me] += 1
        _places[me].append(_place())
        self.reached.wait()
        _raise_error()


class Event:
    """As on CUDA: what waits for it waits for its latest recording at that time."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timing = enable_timing
        self._mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _Mark()
        (stream or current_stream()).put(self._mark)

    def wait(self, stream: Stream | None = None) -> None:
        """The stream waits, not the host."""
        if self._mark is not None:
            (stream or current_stream()).put(self._mark.reached.wait)

    def query(self) -> bool:
        return self._mark is None or self._mark.reached.is_set()

    def synchronize(self) -> None:
        (self._mark or _reached()).wait_on_host()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to the other, when their streams came to them."""
        if not (self._timing and end._timing):
            raise RuntimeError("both events need enable_timing=True")
        if self._mark is None or end._mark is None or not (self.query() and end.query()):
            raise RuntimeError("both events must have happened")
        return (end._mark.time - self._mark.time) * 1000


def _reached() -> _Mark:
    mark = _Mark()
    mark()
    return mark


# ---------------------------------------------------------------- streams

_numbers = itertools.count()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_local = threading.local()
_forked = False


class Stream(torch.Stream):
    """A queue of kernels and the thread that runs them.

    A stream that nobody holds any more does what is queued, and its thread ends.
    """

    _kernels: queue.SimpleQueue[Kernel | None]
    thread: threading.Thread
    priority: int

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        if _forked:
            raise RuntimeError("a forked process cannot use lag: its streams have no threads")
        number = next(_numbers)
        new = super().__new__(cls, stream_id=number, device_index=0, device_type=DEVICE_TYPE)
        new._kernels, new.priority = queue.SimpleQueue(), priority
        work = (new._kernels, number)
        name = f"lag-stream-{number}"
        new.thread = threading.Thread(target=_work, args=work, name=name, daemon=True)
        new.thread.start()
        weakref.finalize(new, new._kernels.put, None).atexit = False
        _streams[number] = new
        return new

    def put(self, kernel: Kernel) -> None:
        """Queue it; the caller goes on."""
        self._kernels.put(kernel)

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Has it nothing to do?"""
        mark = _Mark()
        if not self._kernels.empty():
            return False
        self.put(mark)
        return mark.reached.wait(0.001)

    def synchronize(self) -> None:
        mark = _Mark()
        self.put(mark)
        mark.wait_on_host()

    def __enter__(self) -> Stream:
        stack = _local.__dict__.setdefault("entered", [])
        stack.append(getattr(_local, "stream", None))
        _local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.stream = _local.entered.pop()


def stream_of(any_stream: torch.Stream) -> Stream:
    """What torch has passed on by its number."""
    return _streams[any_stream.stream_id]


@functools.cache
def _default() -> Stream:
    return Stream()


def default_stream(device: Any = None) -> Stream:
    return _default()


def _no_backward() -> Stream | None:
    return None


backward_stream: Callable[[], Stream | None] = _no_backward
"""In a thread of the autograd engine: the stream of the thread that called `backward`."""


def current_stream(device: Any = None) -> Stream:
    """As on CUDA: a new thread begins on the default stream."""
    return getattr(_local, "stream", None) or backward_stream() or _default()


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _local.stream = stream


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Within it, what this thread queues goes there."""
    return contextlib.nullcontext() if stream is None else stream


def synchronize(device: Any = None) -> None:
    """The host waits for all streams, which counts as one wait."""
    marks = [each.record_event() for each in list(_streams.values())]
    done = _Mark()
    for mark in marks:
        assert mark._mark is not None
        mark._mark.reached.wait()
    done()
    done.wait_on_host()


def sleep(seconds: float) -> None:
    """Queue a kernel that takes so long: the model of a slow one."""
    current_stream().put(functools.partial(time.sleep, seconds))


def is_in_bad_fork() -> bool:
    return _forked


def _after_fork() -> None:
    global _forked
    _forked = bool(_streams)


@atexit.register
def _end() -> None:
    """A kernel that runs while the interpreter goes could take the process with it."""
    every = [] if _forked else list(_streams.values())
    for each in every:
        each._kernels.put(None)
    deadline = time.monotonic() + 1.0
    for each in every:
        each.thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork)
