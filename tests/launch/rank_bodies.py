"""Bodies of stand-in ranks in the launcher's tests: each is named as module:function on the rank's command line.

Only those that need torch import it: the import is most of the time of a start.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

from megads.config.root import RootConfig
from megads.errors import NumericalError
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import heartbeat
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.stop import INTERRUPTED, read_stop


def finish(config: RootConfig, run_dir: Path) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    print(f"sum {total.item():.0f} threads {torch.get_num_threads()}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def return_five_one_after_another(config: RootConfig, run_dir: Path) -> int:
    time.sleep(0.7 * rank_environment().rank)
    (run_dir / f"left_{rank_environment().rank}").touch()
    return 5


def fail_on_rank_1_while_peers_wait(config: RootConfig, run_dir: Path) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        raise NumericalError("6 non-finite steps in a row")
    dist.all_reduce(torch.ones(()))
    return 0


def fail_with_a_bug_while_a_peer_is_stopped(config: RootConfig, run_dir: Path) -> int:
    if rank_environment().rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    raise ZeroDivisionError("division by zero in the forward")


def wait_in_a_collective(config: RootConfig, run_dir: Path) -> int:
    """Runs an all-reduce that rank 1 does not join for 60 s; every rank writes its pid."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    (run_dir / f"pid_{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(()))
    return 0


def step_until_stopped(config: RootConfig, run_dir: Path) -> int:
    metrics = MetricsWriter(run_dir, enabled=rank_environment().rank == 0)
    for step in range(1, 600):
        metrics.write({"step": step, "loss": 1.0 / step, "step_time_s": 0.1})
        reason = read_stop(run_dir)
        if reason is not None:
            return 5 if reason == INTERRUPTED else 6
        time.sleep(0.1)
    return 0


def step_twice(config: RootConfig, run_dir: Path) -> int:
    return 0 if read_stop(run_dir) is None else 1


def step_as_planned(config: RootConfig, run_dir: Path) -> int:
    """Writes what a run of train.steps steps writes, at 20 steps a second; resumes from the last checkpoint."""
    saved = [
        event["step"] for event in read_json_lines(run_dir / "events.jsonl") if event["event"] == "checkpoint_saved"
    ]
    metrics, events = MetricsWriter(run_dir, enabled=True), EventWriter(run_dir)
    first = max(saved, default=0)
    metrics.drop_after(first)
    events.write("start", step=first, total_steps=config.train.steps, layout="tp1 pp1 dp1")
    for step in range(first + 1, (config.train.steps or 0) + 1):
        begin = time.perf_counter()
        time.sleep(0.05)
        loss = 2.0 + 6.0 * math.exp(-step / 40) + 0.2 * math.sin(step)
        taken = time.perf_counter() - begin
        metrics.write(
            {
                "step": step,
                "samples": 8 * step,
                "tokens": 1024 * step,
                "loss": loss,
                "grad_norm": 0.5,
                "lr": 1e-3,
                "step_time_s": taken,
                "tokens_per_s": 1024 / taken,
                "mfu": 0.31,
                "skipped": False,
                "batch_hash": "ab",
            }
        )
        if read_stop(run_dir) is not None:
            events.write("checkpoint_saved", step=step, folder=f"step_{step:08d}")
            return 5
        if step % 10 == 0:
            events.write("checkpoint_saved", step=step, folder=f"step_{step:08d}")
            metrics.write({"step": step, "valid/held_out/loss": loss + 0.1, "valid/held_out/ppl": math.exp(loss + 0.1)})
        if (run_dir / "die").exists() and step % 10 == 7:
            (run_dir / "die").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    events.write("end", step=config.train.steps)
    return 0


def beat_until_stopped(config: RootConfig, run_dir: Path) -> int:
    """Runs an all-reduce with heartbeats in every step, as in training; each rank writes its pid."""
    import torch
    import torch.distributed as dist

    environment = rank_environment()
    with heartbeat(environment.heartbeats, environment.rank) as beats:
        dist.init_process_group("gloo", timeout=timedelta(seconds=config.cluster.timeout_s))
        for step in range(1, 100_000):
            beats.enter("all_reduce", step)
            dist.all_reduce(torch.ones(()))
            if step == 3:
                (run_dir / f"pid_{environment.rank}").write_text(str(os.getpid()))
            beats.enter("between steps")
            time.sleep(0.01)
    return 0


def hold_the_interpreter(config: RootConfig, run_dir: Path) -> int:
    """Rank 1 calls native code that does not release the GIL; rank 0 waits for it in an all-reduce."""
    import torch
    import torch.distributed as dist

    environment = rank_environment()
    with heartbeat(environment.heartbeats, environment.rank) as beats:
        dist.init_process_group("gloo", timeout=timedelta(seconds=config.cluster.timeout_s))
        beats.enter("native code" if environment.rank == 1 else "all_reduce", step=7)
        if environment.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        dist.all_reduce(torch.ones(()))
    return 0


def meet_until_told(config: RootConfig, run_dir: Path) -> int:
    """Opens a world as training does, on rank 1 once `late` exists, and communicates in it until `go` exists."""
    import torch

    from megads.runtime.distributed import world

    rank = rank_environment().rank
    while rank == 1 and not (run_dir / "late").exists():
        time.sleep(0.02)
    with world(torch.device("cpu"), 30.0) as control:
        (run_dir / f"met_{rank}").touch()
        while not control.first_decides((run_dir / "go").exists, bool):
            assert control.gather(f"rank {rank}", str) == ["rank 0", "rank 1"]
            time.sleep(0.02)
    return 0
