"""Reading a run's files, complete or damaged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megads.errors import ConfigError
from megads.tools.report.history import number, read_history
from tests.checkpoint.random_layouts import global_tensors, random_layout, run_record, shards_of
from tests.tools.report.written_runs import (
    falling_loss,
    write_config,
    write_eventful_run,
    write_experts,
    write_steps,
    write_validation,
)


def test_an_eventful_run(tmp_path: Path) -> None:
    """Catches a metric, a validation or a restart that is not read."""
    write_eventful_run(tmp_path, "mine")
    history = read_history(tmp_path)
    assert history.run_id == "mine"
    np.testing.assert_array_equal(history.step, np.arange(1, 301))
    assert history.columns["loss"][9] == falling_loss(10)
    assert math.isinf(history.columns["loss"][149])
    assert np.flatnonzero(history.columns["skipped"]).tolist() == [149, 150]
    [validation] = history.validations
    assert (validation.name, validation.unigram_loss) == ("held_out", 6.2)
    assert (validation.step.tolist(), validation.loss.tolist()) == ([100, 200, 300], [5.4, 4.6, 4.3])
    assert history.restarts == [100, 200]
    assert history.setting("train.steps") == 1000 and history.setting("train.no.such") is None
    assert history.unreadable_lines == 0


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    """Catches a report that fails at a truncated line, and one that does not count it."""
    write_steps(tmp_path, 1, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0, "gr\n\x00\x00\n[1, 2]\n{"loss": 3.0}\n{"step": "x", "loss": 3.0}\n')
        file.write('{"step": 5, "loss": null, "lr": "high", "grad_norm": 1e999}\n{"step": 6, "lo')
    history = read_history(tmp_path)
    assert history.step.tolist() == [1, 2, 3, 5]
    assert history.unreadable_lines == 3, "the last line is still being written"
    assert math.isnan(history.columns["loss"][3]) and math.isnan(history.columns["lr"][3])
    assert math.isinf(history.columns["grad_norm"][3])


def test_a_step_written_twice_counts_once(tmp_path: Path) -> None:
    """Catches a curve that runs backwards where a killed start and its successor recorded the same steps."""
    write_steps(tmp_path, 1, 10, loss=lambda step: 1.0)
    write_steps(tmp_path, 6, 12, loss=lambda step: 2.0)
    write_validation(tmp_path, 10, 3.0)
    write_validation(tmp_path, 10, 4.0)
    history = read_history(tmp_path)
    assert history.step.tolist() == list(range(1, 13))
    assert history.columns["loss"].tolist() == [1.0] * 5 + [2.0] * 7
    assert history.validations[0].loss.tolist() == [4.0]


def test_files_that_are_missing_or_foreign(tmp_path: Path) -> None:
    """Catches a report that needs a config of this version, although old runs must stay readable, and one that reads a
    config that no start has written."""
    run_dir = tmp_path / "old"
    run_dir.mkdir()
    write_steps(run_dir, 1, 2)
    assert read_history(run_dir).run_id == "old"
    (run_dir / "config.yaml").write_text("model: {layers: 3}\nrun: 7\n")
    assert read_history(run_dir).setting("model.layers") == 3
    for text in ("a: [b\n", "a: '${oc.env:HOME}'\n", "a: &a [x]\nb: [*a, *a]\n"):
        (run_dir / "config.yaml").write_text(text)
        assert read_history(run_dir).config == {}


def test_checkpoints_with_their_sizes(tmp_path: Path) -> None:
    """Catches a size that omits a rank's file, and an incomplete checkpoint reported as committed."""
    from megads.checkpoint.store import save_checkpoint

    write_steps(tmp_path, 1, 2)
    for step in (3, 20):
        [layout] = random_layout(step, 1)
        save_checkpoint(tmp_path, shards_of(layout, global_tensors(step)), run_record(step))
    (tmp_path / "checkpoints" / "step_00000020" / "manifest.json").unlink()
    first, second = read_history(tmp_path).checkpoints
    files = list((tmp_path / "checkpoints" / "step_00000003").iterdir())
    assert len(files) == 2 and first.size_bytes == sum(path.stat().st_size for path in files)
    assert [(item.step, item.committed) for item in (first, second)] == [(3, True), (20, False)]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    """Catches the same error message for three different mistakes."""
    with pytest.raises(ConfigError, match="there is no run directory"):
        read_history(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_history(tmp_path)
    write_config(tmp_path, "new")
    with pytest.raises(ConfigError, match=r"has no step yet: .*logs says why"):
        read_history(tmp_path)
    write_validation(tmp_path, 0, 9.0)
    with pytest.raises(ConfigError, match="has no step yet"):
        read_history(tmp_path)


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (True, 1.0), (10**400, math.inf), (-math.inf, -math.inf)])
def test_number(value: object, expected: float) -> None:
    """Catches an integer too large for a float that ends the report."""
    assert number(value) == expected
    assert math.isnan(number("3")) and math.isnan(number(None))


def test_the_load_of_experts_is_read_by_layer_and_step(tmp_path: Path) -> None:
    """Catches layers numbered from 0 among those with experts, lines by layer read as steps or validations, and steps
    that a resume repeated."""
    write_config(tmp_path, "experts")
    write_experts(tmp_path, 1, 80)
    write_experts(tmp_path, 71, 90)
    history = read_history(tmp_path)
    loads = history.loads
    assert loads is not None and loads.layers == (1, 3)
    assert loads.step.tolist() == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]
    assert loads.max_load.tolist() == [[1.25] * 9, [4.0] * 6 + [1.5] * 3]
    assert loads.dead.tolist() == [[0.0] * 9, [3.0] * 6 + [0.0] * 3]
    assert len(history.step) == 90 and history.validations == ()
    assert history.columns["moe/balance_loss"][0] == pytest.approx(0.5 / 16)
    assert history.last_event("experts_idle")["experts"] == [1, 2, 3]
