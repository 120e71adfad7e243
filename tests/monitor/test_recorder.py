"""Each step once, whatever the files went through."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.monitor.recorder import Feed, FeedPosition, News
from megads.runtime.metrics import EventWriter, MetricsWriter


class Run:
    """A run's files, written as rank 0 writes them."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.metrics, self.events = MetricsWriter(run_dir, True), EventWriter(run_dir)

    def start(self, step: int) -> None:
        self.metrics.drop_after(step)
        self.events.write("start", step=step)

    def steps(self, first: int, last: int, loss: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.metrics.write({"step": step, "loss": loss})
            if step % 5 == 0:
                self.metrics.write({"step": step, "valid/a/loss": loss})


def steps(news: News) -> list[int]:
    return [record["step"] for record in news.metrics if "loss" in record]


def test_goes_on_where_it_left_off(tmp_path: Path) -> None:
    """Catches a second start that tells everything again."""
    run, path = Run(tmp_path), tmp_path / "position.json"
    run.start(0)
    run.steps(1, 6)
    feed = Feed(tmp_path, FeedPosition.load(path), rewinds=True)
    assert steps(feed.read()) == [1, 2, 3, 4, 5, 6]
    assert not feed.read()
    feed.position.save(path)
    run.start(6)
    run.steps(7, 8)
    again = Feed(tmp_path, FeedPosition.load(path), rewinds=True).read()
    assert (steps(again), again.rewound_to, len(again.events)) == ([7, 8], None, 1)
    path.write_text("{half a")
    assert steps(Feed(tmp_path, FeedPosition.load(path), rewinds=True).read()) == list(range(1, 9))


@pytest.mark.parametrize("regrown_to", [6, 9, 30])
def test_a_resume_from_before(tmp_path: Path, regrown_to: int) -> None:
    """Catches doubled or lost steps when a file was cut back, and outgrew its old length before anybody looked."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    able, unable = (Feed(tmp_path, FeedPosition(), rewinds) for rewinds in (True, False))
    assert steps(able.read()) == steps(unable.read()) == list(range(1, 10))
    run.start(5)
    run.steps(6, regrown_to, loss=2.0)
    news = able.read()
    assert (news.rewound_to, steps(news)) == (5, list(range(6, regrown_to + 1)))
    assert all(record["loss"] == 2.0 for record in news.metrics if "loss" in record)
    news = unable.read()
    assert (news.rewound_to, steps(news)) == (None, list(range(10, regrown_to + 1)))
    validations = [record["step"] for record in news.metrics if "loss" not in record]
    assert validations == list(range(10, regrown_to + 1, 5))
    run.steps(regrown_to + 1, regrown_to + 1)
    assert steps(able.read()) == [regrown_to + 1]
    assert steps(unable.read()) == ([regrown_to + 1] if regrown_to >= 9 else [])


def test_stale_lines_are_not_passed_on(tmp_path: Path) -> None:
    """Catches steps read just before a resume took them back."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    feed = Feed(tmp_path, FeedPosition(), rewinds=False)
    read = feed._metrics.read

    def resume_in_between() -> list[dict[str, object]]:
        records = read()
        feed._metrics.read = read  # type: ignore[method-assign]
        run.start(5)
        run.steps(6, 7, loss=2.0)
        return records

    feed._metrics.read = resume_in_between  # type: ignore[method-assign]
    news = feed.read()
    assert steps(news) == [1, 2, 3, 4, 5, 6, 7]
    assert [record["loss"] for record in news.metrics if record["step"] == 6] == [2.0]


def test_the_server_knows_better(tmp_path: Path) -> None:
    """Catches steps that were passed on but never arrived."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    feed = Feed(tmp_path, FeedPosition(), rewinds=False)
    feed.read()
    feed.go_on_from(9)
    assert not feed.read()
    feed.go_on_from(4)
    assert steps(feed.read()) == [5, 6, 7, 8, 9]
