"""Tests that the files of a rehearsal are read as they were written."""

from __future__ import annotations

from pathlib import Path

from megads.tools.doctor.finding import note, ok, problem
from megads.tools.rehearse.notes import Orders, RehearsedStart, read_orders, read_starts, write_orders, write_start


def test_orders_and_starts_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Catches a field that is lost, starts out of order from the tenth on, and a partial file that is read."""
    orders = Orders(48, 8, 79.5, 2, 8, "data/small", 1_000_000, elsewhere=True, refused=False)
    write_orders(tmp_path, orders)
    assert read_orders(tmp_path) == orders and read_starts(tmp_path) == []
    bad = problem("data", "no such file", "the run stops", "make it")
    starts = [RehearsedStart((ok("config", "fits"), note("disk", "slow", "time", "move")), "runs/a", "small/0", "tp2")]
    starts += [RehearsedStart((bad,), f"runs/{number}") for number in range(11)]
    for start in starts:
        write_start(tmp_path, start)
    (tmp_path / "start_999.json.1.partial").write_text("{")
    assert read_starts(tmp_path) == starts
    assert not list(tmp_path.glob("orders*partial"))
