"""Times of operators in traces like those of a GPU; those of a CPU are tested with real ones (test_torch_profiler)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from megads.tools.profile.operators import operator_times, read_operators
from megads.tools.profile.trace_files import newest_traces, trace_path


def event(category: str, name: str, begin: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}


def flow(number: int, kind: str, time: float, thread: int) -> dict[str, Any]:
    return {"ph": kind, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "tid": thread, "ts": time}


def launch(number: int, begin: float, thread: int = 1, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, begin, begin + 1, thread, correlation=number)


def kernel(number: int, name: str, begin: float, microseconds: float) -> dict[str, Any]:
    return event("kernel", name, begin, begin + microseconds, 7, correlation=number)


OF_A_GPU = [
    event("user_annotation", "forward 0", 0, 100),
    event("user_annotation", "attention: blocks.0.attention", 10, 50),
    event("cpu_op", "aten::linear", 20, 40),
    event("cpu_op", "aten::addmm", 22, 38),
    launch(1, 30),
    event("user_annotation", "norm: blocks.0.attention.q_norm", 42, 48),
    event("cpu_op", "aten::rms_norm", 43, 47),
    launch(2, 44),
    event("cpu_op", "aten::nll_loss", 60, 70),
    launch(3, 62),
    # On a GPU, autograd runs in a thread of its own.
    event("user_annotation", "backward 0", 100, 300),
    event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 110, 200, thread=2),
    event("cpu_op", "AddmmBackward0", 111, 199, thread=2),
    event("cpu_op", "aten::mm", 120, 130, thread=2),
    launch(4, 125, thread=2),
    flow(5, "s", 22, 1),
    flow(5, "f", 111, 2),
    # Recomputed in the backward pass.
    event("cpu_op", "autograd::engine::evaluate_function: GeluBackward0", 210, 290, thread=2),
    event("user_annotation", "MLP: blocks.0.mlp", 220, 280, thread=2),
    event("cpu_op", "aten::gelu", 230, 240, thread=2),
    launch(5, 232, thread=2),
    event("user_annotation", "reduce gradients", 300, 320),
    event("cpu_op", "c10d::reduce_scatter", 301, 310),
    launch(6, 305),
    event("user_annotation", "optimizer step", 320, 400),
    event("cpu_op", "aten::_fused_adamw_", 330, 390),
    launch(7, 340),
    launch(8, 420, name="cudaGraphLaunch"),
    kernel(1, "gemm<128>(float*)", 500, 1000),
    kernel(2, "norm_kernel", 1500, 20),
    kernel(3, "nll", 1520, 30),
    kernel(4, "gemm<64>(float*)", 2000, 2000),
    kernel(5, "gelu", 3900, 60),
    kernel(6, "ncclDevKernel_ReduceScatter(args)", 4000, 400),
    kernel(7, "adamw", 5000, 50),
    kernel(8, "captured", 6000, 5),
    kernel(99, "of nobody", 7000, 1),
]


def test_kernels_count_to_the_part_that_launched_them() -> None:
    """Catches kernels counted to the host's clock, gradients that count to no part because autograd has its own thread,
    and a norm inside of attention that counts to it."""
    rows, on_gpu = operator_times({"traceEvents": OF_A_GPU, "megads": {"has_head": True}})
    assert on_gpu
    found = {(row.part, row.phase, row.name): (row.calls, round(1e6 * row.seconds)) for row in rows}
    assert found == {
        ("attention", "forward", "aten::addmm"): (1, 1000),
        ("norm", "forward", "aten::rms_norm"): (1, 20),
        ("head and loss", "forward", "aten::nll_loss"): (1, 30),
        ("attention", "backward", "aten::mm"): (1, 2000),
        ("MLP", "recompute", "aten::gelu"): (1, 60),
        ("communication", "reduction", "ncclDevKernel_ReduceScatter"): (1, 400),
        ("optimizer", "optimizer", "aten::_fused_adamw_"): (1, 50),
        ("CUDA graph", "", "captured"): (1, 5),
        ("other", "", "of nobody"): (1, 1),
    }


def test_what_is_not_a_loss_without_the_head() -> None:
    """Catches the first stage's own work that counts to a loss which it does not compute."""
    rows, _ = operator_times({"traceEvents": OF_A_GPU, "megads": {"has_head": False}})
    assert [row.part for row in rows if row.name == "aten::nll_loss"] == ["other"]


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_traces_of_the_newest_steps_are_added(tmp_path: Path) -> None:
    """Catches a table of an older profile, ranks of one stage that count twice, and a torn trace that makes the report
    fail."""
    whole = gzip.compress(json.dumps({"traceEvents": OF_A_GPU, "megads": {"has_head": True}}).encode())
    for rank, stage in ((0, 0), (1, 1), (2, 0), (3, 1)):
        write(trace_path(tmp_path, 7, 8, rank, stage), whole)
    write(trace_path(tmp_path, 3, 4, 0, 0), whole)
    write(trace_path(tmp_path, 7, 8, 4, 2), whole[: len(whole) // 2])
    write(trace_path(tmp_path, 7, 8, 5, 3), gzip.compress(b"[1]"))
    write(trace_path(tmp_path, 7, 8, 6, 4), gzip.compress(b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}'))
    assert [file.rank for file in newest_traces(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    table = read_operators(tmp_path)
    assert table is not None and table.ranks == (0, 1) and table.num_steps == 4
    assert (table.first_step, table.last_step, table.on_gpu) == (7, 8, True)
    assert next(iter(table.parts())) == "attention" and round(1e6 * table.parts()["attention"]) == 6000
    assert read_operators(tmp_path / "another") is None
