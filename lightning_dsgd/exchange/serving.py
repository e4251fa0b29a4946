"""What every communication thread does around its own work."""

from __future__ import annotations

from collections.abc import Callable

from lightning_dsgd.backends.streams import Streams
from lightning_dsgd.control.alarm import Alarm
from lightning_dsgd.errors import RunError


def serve(work: Callable[[], None], streams: Streams, alarm: Alarm, rank: int) -> None:
    """By the exchange's own stream; what ends it other than by its own will ends the run."""
    try:
        streams.enter()
        with streams.own():
            work()
    except RunError as error:
        alarm.ring(error)
    except Exception as error:
        alarm.ring(RunError(f"rank {rank}: {type(error).__name__}: {error}"))
