"""The run at a glance."""

from __future__ import annotations

from lightning_dsgd.control.tally import Tally
from lightning_dsgd.workers.messages import Applied, Contribution, Dropped, Round


def test_the_table_tells_who_was_slow_and_whose_work_was_used() -> None:
    tally = Tally(4)
    tally.event(Contribution(0, 1, 0, seconds=(0.1, 0.3)))
    tally.event(Contribution(1, 1, 0, seconds=(0.5,)))
    tally.event(Applied(2, 1, cancelled=(1.0, 2.0)))
    tally.decision(Round(1, (0,), (1,), (0,), (2,), 1, "one of 4 workers arrived"))
    tally.decision(Dropped(1, 1, "late"))
    title, _, *rows = tally.table().splitlines()
    assert title == "1 updates"
    assert [row.split()[:6] for row in rows] == [
        ["0", "0.2000", "1", "0", "0", "2"],
        ["1", "0.5000", "0", "1", "0", "0"],
        ["2", ">1.5000", "0", "0", "2", "0"],  # every gradient was cancelled: it takes longer
        ["3", "-", "0", "0", "0", "0"],
    ]


def test_the_table_has_a_column_for_what_was_not_finite_if_anything_was() -> None:
    tally = Tally(2)
    assert "not finite" not in tally.table()
    tally.event(Contribution(1, 1, 0, finite=False))
    tally.decision(Dropped(1, 1, "it is not finite"))
    _, head, *rows = tally.table().splitlines()
    assert head.endswith("not finite") and [row.split()[-1] for row in rows] == ["0", "1"]
    assert rows[1].split()[3] == "1"
