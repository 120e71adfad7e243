"""The table of scripts/bench/gpu.sh, from lines recorded by a check on a CPU, unchanged and edited."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from megads.runtime.metrics import read_json_lines
from scripts.bench.gpu_table import LONGEST, WIDTH, Line, lines_of_runs, run_rows, table

RECORDED = Path(__file__).with_name("gpu_lines.jsonl")


@pytest.fixture
def lines() -> list[Line]:
    """The lines that gpu.sh --check wrote."""
    return lines_of_runs(RECORDED)


def row(shown: str, start: str) -> str:
    """The only row that begins with `start`."""
    (found,) = [line for line in shown.splitlines() if line.startswith(start)]
    return found


def of(lines: list[Line], **fields: object) -> list[Line]:
    """Lines with these values."""
    return [line for line in lines if all(line.get(key) == value for key, value in fields.items())]


def test_everything_recorded_is_shown(lines: list[Line]) -> None:
    """Catches a missing section, and a table too wide or too long for the end of a log."""
    shown = table(lines)
    assert all(len(line) <= WIDTH for line in shown.splitlines()) and len(shown.splitlines()) <= LONGEST
    for line in lines:
        assert str(line.get("kernel", "")) in shown
    assert "yes" in row(shown, "1.3b Hugging Face") and "equal" in row(shown, "resumed, ops.impl=fused")
    assert "figures are meaningless" in shown and "NOT RUN" not in shown and "FAILED" not in shown
    assert "1.01" in row(shown, "ALiBi softmax") and row(shown, "RMSNorm").count(" + ") == 3, "compiled is joined"


def test_a_share_of_the_copy_is_of_the_bytes_that_must_move(lines: list[Line]) -> None:
    """Catches microseconds read as seconds, bytes of the other direction, and a wrong kernel reported as fast."""
    for name in ("LayerNorm", "RMSNorm", "ALiBi softmax"):
        for line in of(lines, kernel=name):
            line |= {"moved_bytes": [300_000_000, 450_000_000], "copy_bytes_per_s": 3e12}
            line["sides"]["ours"] = {"fwd_us": 110.0, "bwd_us": 300.0}
    of(lines, kernel="ALiBi softmax")[0]["error_ratio"] = float("nan")
    shown = table(lines)
    assert "2727" in row(shown, "LayerNorm") and "110 + 300 (91%, 50%)" in row(shown, "LayerNorm")
    assert row(shown, "LayerNorm").endswith("yes") and row(shown, "ALiBi softmax").endswith("WRONG")


def test_a_kernel_below_its_target_is_reported(lines: list[Line]) -> None:
    """Catches a verdict that is always yes."""
    for line in of(lines, kernel="LayerNorm"):
        line |= {"moved_bytes": [300_000_000, 450_000_000], "copy_bytes_per_s": 3e12}
        line["sides"]["ours"]["fwd_us"] = 130.0
    assert row(table(lines), "LayerNorm").endswith("no, <90%")


def test_differing_peers_and_missing_rows_are_reported(lines: list[Line]) -> None:
    """Catches a peer with different losses, an out-of-memory that is not reported, and an MFU compared with the wrong
    bound."""
    (fused,), (peer,) = of(lines, side="fused"), of(lines, side="hf")
    peer["losses"] = [*peer["losses"][:-1], peer["losses"][-1] * 1.1]
    peer["losses"][1] *= 1.1
    fused["mfu"] = 0.51
    lost = {"size": "1.3b", "side": "torch", "outcome": "out of memory", "reason": "planned 54.0 GiB"}
    shown = table([*lines, fused | {"size": "350m"}, fused | lost | {"size": "760m"}])
    assert " NO" in row(shown, "1.3b Hugging Face") and "MFU 50%: yes" in row(shown, "1.3b megads fused")
    assert "MFU" not in row(shown, "350m megads fused")
    assert "out of memory: planned 54.0 GiB" in row(shown, "760m megads torch")


def test_every_target_is_judged(lines: list[Line]) -> None:
    """Catches a speed, a cost of determinism or a ratio to a peer computed from the wrong sides, and a peer that is not
    compared where torch's operators did not run."""
    (fused,) = of(lines, side="fused")
    rows = [
        fused | {"size": "8b", "tokens_per_s": 10472.0},
        fused | {"size": "1.3b", "step_s": 1.04},
        fused | {"size": "1.3b", "side": "fused_free", "step_s": 1.0},
        fused | {"size": "llama_1b", "tokens_per_s": 300.0},
        fused | {"size": "llama_1b", "side": "torchtitan", "tokens_per_s": 200.0},
        fused | {"size": "qwen3_moe", "tflops_per_device": 90.0},
        fused | {"size": "qwen3_moe", "side": "fused_loop", "tflops_per_device": 84.0},
        fused | {"size": "qwen3_dense", "tflops_per_device": 100.0},
    ]
    shown = table([line for line in lines if line["bench"] != "gpu_train"] + rows)
    assert row(shown, "8b megads fused").endswith("-     >10471: yes")
    assert row(shown, "1.3b fused, nondeterm.").endswith("yes   +4.0%: yes")
    assert row(shown, "llama_1b torchtitan").endswith("yes   ours 1.50 x")
    assert row(shown, "qwen3_moe megads fused").endswith("90%: yes")
    assert row(shown, "qwen3_moe fused, loop of GE").endswith("84%: no")
    assert "%: " not in row(shown, "qwen3_dense megads fused")


def test_items_that_did_not_run_are_reported(lines: list[Line]) -> None:
    """Catches an item that did not run and is missing from the table."""
    item = of(lines, bench="gpu_item", stage="train")[0]
    late = item | {"name": "torch", "outcome": "not run", "reason": "no time left"}
    failed = item | {"outcome": "failed", "reason": "exit code 1"}
    too_few = [late | {"name": f"layout {number}", "reason": "needs 2 GPUs"} for number in range(14)]
    shown = table([*lines, late, failed, *too_few])
    assert "NOT RUN: 14 layouts that need more GPUs" in shown
    assert "NOT RUN: train: torch (no time left)" in shown
    assert "FAILED: train: 1.3b fused (exit code 1)" in shown


def test_a_table_stays_short(lines: list[Line]) -> None:
    """Catches a table of many layouts that pushes its own beginning out of a short log."""
    layout = of(lines, bench="gpu_item", stage="layouts")[0]
    many = [layout | {"name": f"layout {number}"} for number in range(LONGEST)]
    shown = table([*lines, *many]).splitlines()
    assert len(shown) == LONGEST and shown[-1].endswith("lines more")


def test_the_table_shows_the_last_run(tmp_path: Path, lines: list[Line]) -> None:
    """Catches results of an earlier run among those of the last, and lines of other benchmarks."""
    path = tmp_path / "bench.jsonl"
    later = copy.deepcopy(of(lines, bench="gpu_train", side="fused"))
    later[0] |= {"run": "later", "step_s": 1.0}
    foreign = [{"bench": "train_step", "verdicts": []}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *foreign, *later]))
    assert len(list(read_json_lines(path))) == len(lines) + 2
    assert [line["run"] for line in lines_of_runs(path)] == ["later"]
    both = table(lines_of_runs(path, runs=2))
    assert "1000.0" in row(both, "1.3b megads fused") and "RMSNorm" in both
    with pytest.raises(SystemExit, match=r"no line of scripts/bench/gpu\.sh"):
        path.write_text(json.dumps(foreign[0]) + "\n")
        lines_of_runs(path)


def test_cases_of_several_ranks_have_a_row_each() -> None:
    """Catches a case that hangs, fails or does not run and has no row, and a difference that looks like success."""
    item = {"bench": "gpu_item", "run": "now", "time": 0.0, "stage": "nccl", "seconds": 9.0, "reason": ""}
    case = {"bench": "gpu_runs", "run": "now", "time": 0.0}
    found = [
        item | {"name": "tp2", "outcome": "done"},
        case | {"name": "tp2", "verdict": "17 checks hold", "good": True},
        item | {"name": "cp2", "outcome": "failed"},
        case | {"name": "cp2", "verdict": "DIFFERS", "good": False},
        item | {"name": "pp2", "outcome": "ended for lack of time", "reason": "after 75 s"},
        item | {"name": "dp2", "outcome": "not run", "reason": "no time left"},
    ]
    shown = table(found)
    assert row(shown, "tp2").endswith("9  17 checks hold") and row(shown, "cp2").endswith("NO: DIFFERS")
    assert row(shown, "pp2").endswith("ENDED FOR LACK OF TIME: after 75 s")
    assert row(shown, "dp2").endswith("NOT RUN: no time left")
    assert [line.split()[0] for line in run_rows(found, ["dp2"])] == ["dp2"]
