"""`python -m tests.faults <fault> train ...`: the real `megads train` with a fault injected into its ranks.

Only the ranks' entry differs: it builds the real engine, breaks one thing in it, and runs megads.train.loop.train.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system_calls import Point, trace_this_process

# No import of torch here: the launcher does not need it, and a rank imports it through megads.train.
FAULTY_RANK = 1
FAULTY_STEP = 3
SUSPICIOUS_STEP = 14


class InjectedError(RuntimeError):
    """Stands for any exception in a rank's own code."""


def raise_in_forward(config: Any, run_dir: Path) -> int:
    """The last stage that the faulty rank holds raises in its forward pass."""

    def fail(*_: Any) -> None:
        raise InjectedError("injected into the forward")

    return _train(config, run_dir, lambda engine: _stage(engine).register_forward_pre_hook(fail))


def raise_in_backward(config: Any, run_dir: Path) -> int:
    """A parameter of the faulty rank raises in the backward pass, when its gradient is computed."""

    def fail(_: Any) -> None:
        raise InjectedError("injected into the backward")

    return _train(config, run_dir, lambda engine: _parameter(engine).register_hook(fail))


def on_two_nodes(config: Any, run_dir: Path) -> int:
    """Splits the ranks over two nodes with their own memory; each node keeps replicas of the other's checkpoints."""
    from megads.checkpoint import local_files, local_saves
    from megads.config.frozen import config_digest, freeze
    from megads.runtime.run_dir import recorded_config_path
    from megads.train.loop import train

    half = int(os.environ["WORLD_SIZE"]) // 2
    node, local_rank = divmod(int(os.environ["RANK"]), half)
    os.environ |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(half)}
    local_saves.node_folder = lambda root, folder: local_files.node_folder(root / f"node_{node}", folder)  # type: ignore[attr-defined]
    (Path(config.checkpoint.local_folder) / f"node_{node}").mkdir(exist_ok=True)
    # The launcher, which knows of one node, would refuse it; every start keeps a copy of its config.
    config.checkpoint.replicate = True
    if not int(os.environ["RANK"]):
        freeze(config, recorded_config_path(run_dir, config_digest(config)))
    return train(config, run_dir)


def poison_weight(config: Any, run_dir: Path) -> int:
    """One element of one parameter of the faulty rank becomes NaN and stays NaN."""

    def poison(engine: Any) -> None:
        _parameter(engine).data.view(-1)[3] = float("nan")

    return _train(config, run_dir, poison)


def poison_gradient_once(config: Any, run_dir: Path) -> int:
    """One gradient of one micro-batch is NaN on the faulty rank."""

    def poison(engine: Any) -> None:
        def once(gradient: Any) -> Any:
            handle.remove()
            return gradient * float("nan")

        # Not the weight's: our own GEMMs accumulate it into main_grad, where no autograd hook sees it.
        handle = _parameter(engine, "qkv.bias").register_hook(once)

    return _train(config, run_dir, poison)


def flip_bit_once(config: Any, run_dir: Path) -> int:
    """One bit of an optimizer moment flips on the faulty rank, in the first start only."""

    def flip(engine: Any) -> None:
        import torch

        if not (run_dir / "flipped").exists():
            (run_dir / "flipped").touch()
            moment = next(
                it.tensor for it in engine.replicas() if it.key.endswith("qkv.weight") and "exp_avg/" in it.key
            )
            moment.view(torch.int32)[5] ^= 1 << 20

    return _train(config, run_dir, flip)


def wrong_product_once(config: Any, run_dir: Path) -> int:
    """The output of one GEMM of the faulty rank has a few flipped bits."""
    from tests.faulty_products import FaultyProducts, once

    return _train(config, run_dir, lambda _: FaultyProducts(once(2)).install())


def huge_product_once(config: Any, run_dir: Path) -> int:
    """One weight gradient of the faulty rank is huge but finite, after the loss has been watched for a while."""
    from tests.faulty_products import FaultyProducts, once

    kinds = ("weight_gradient", "add_weight_gradient")
    return _train(config, run_dir, lambda _: FaultyProducts(once(2, bit=30), *kinds).install(), SUSPICIOUS_STEP)


def wrong_products(config: Any, run_dir: Path) -> int:
    """Every GEMM output of the faulty rank has flipped bits, others each time, in the first start only."""
    from tests.faulty_products import FaultyProducts, at_random

    def break_for_good(_: Any) -> None:
        if not (run_dir / "broken").exists():
            (run_dir / "broken").touch()
            FaultyProducts(at_random).install()

    return _train(config, run_dir, break_for_good)


def die_in_validation(config: Any, run_dir: Path) -> int:
    """The launcher and the ranks are killed when the final checkpoint is saved and validation begins."""
    from megads.evaluate.validation import ValidationHook
    from megads.train import loop as train

    def die(_: ValidationHook) -> float:
        os.kill(_launcher(), signal.SIGKILL)
        signal.pause()
        raise AssertionError("outlived its launcher")

    ValidationHook.validate = die  # type: ignore[method-assign]
    return train.train(config, run_dir)


def die_after_a_step(config: Any, run_dir: Path) -> int:
    """The faulty rank is killed before its third step, at every start."""
    return _train(config, run_dir, lambda _: os.kill(os.getpid(), signal.SIGKILL))


HOLD_STEP = "MEGADS_TESTS_HOLD_STEP"
"""Environment variable: the step before which `hold` waits for good."""


def hold(config: Any, run_dir: Path) -> int:
    """Rank 0 waits for good before a step: a run that is to be killed does not end before, however slow its killer."""
    from megads.train import loop as train

    build, at = train.build_engine, int(os.environ[HOLD_STEP])

    def build_held(run: Any, *more: Any, **options: Any) -> Any:
        engine = build(run, *more, **options)
        if run.grid.rank == 0:
            _before_step(engine, at, signal.pause)
        return engine

    train.build_engine = build_held
    return train.train(config, run_dir)


def take_all_memory_once(config: Any, run_dir: Path) -> int:
    """The faulty rank allocates memory until the OOM killer ends it, in the first start only."""

    def take(_: Any) -> None:
        if not (run_dir / "took_memory").exists():
            (run_dir / "took_memory").touch()
            taken = [b"\1" * (64 << 20) for _ in range(80)]
            raise InjectedError(f"nothing limits {len(taken)} blocks of memory")

    return _train(config, run_dir, take)


CLOCK_JUMPED = "MEGADS_TESTS_CLOCK_JUMPED"
"""Environment variable of a rank, set when its clock has jumped; read by the preloaded library."""


def jump_in_time(config: Any, run_dir: Path) -> int:
    """The faulty rank's clock jumps; its time before and after goes to the file clocks."""

    def jump(_: Any) -> None:
        before = time.time()
        os.environ[CLOCK_JUMPED] = "1"
        (run_dir / "clocks").write_text(f"{before} {time.time()}")

    return _train(config, run_dir, jump)


HANG_STEP = "MEGADS_TESTS_HANG_STEP"
"""Environment variable: the step at which `hang_once` hangs."""
HANG_WAY = "MEGADS_TESTS_HANG_WAY"
"""Environment variable: how it hangs, a key of `_HANGS`."""


def _sleep() -> None:
    time.sleep(3600)


def _hold_the_interpreter() -> None:
    """A deadlock in native code that holds the GIL; a sleep there would end at the first signal."""
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True:
        library.pthread_mutex_lock(mutex)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_HANGS: dict[str, Callable[[], None]] = {
    "hook": _sleep,
    "collective": _sleep,
    "interpreter": _hold_the_interpreter,
    "stop": _stop,
}


def hang_once(config: Any, run_dir: Path) -> int:
    """The faulty rank hangs at one step, before the engine step or in a hook, in the first start only."""
    from megads.monitor.hooks import MetricsHook
    from megads.train import loop as train

    way, at = os.environ[HANG_WAY], int(os.environ[HANG_STEP])
    marker = run_dir / "has_hung"

    def hang() -> None:
        marker.touch()
        _HANGS[way]()

    if marker.exists():
        return train.train(config, run_dir)
    if way != "hook":
        return _train(config, run_dir, lambda _: hang(), at)
    on_step = MetricsHook.on_step

    def slow_on_step(hook: Any, info: Any) -> None:
        if info.step == at and os.environ["RANK"] == str(FAULTY_RANK):
            hang()
        on_step(hook, info)

    MetricsHook.on_step = slow_on_step  # type: ignore[method-assign]
    return train.train(config, run_dir)


KILL_AT = "MEGADS_TESTS_KILL_AT"
"""Environment variable: the number of file changes after which to kill, and what is killed: run or rank."""


def hang_at_the_start(config: Any, run_dir: Path) -> int:
    """The faulty rank of the first start never gets its data open, before the first step."""
    import megads.train.loop as module

    marker = run_dir / "has_hung"
    if int(os.environ["RANK"]) == FAULTY_RANK and not marker.exists():
        marker.touch()
        module.open_run_data = lambda *_arguments: _sleep()  # type: ignore[assignment]
    return module.train(config, run_dir)


def die_in_a_save(config: Any, run_dir: Path) -> int:
    """The run, or rank 0 alone, is killed before the n-th change to a file or directory of the checkpoints."""
    from megads.train import loop as train

    left, _, target = os.environ[KILL_AT].partition(" ")
    changes_left = int(left)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes_left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")):
            return
        if "/checkpoints" not in os.fspath(arguments[0]):
            return
        changes_left -= 1
        if changes_left == 0:
            os.kill(_launcher() if target == "run" else os.getpid(), signal.SIGKILL)
            signal.pause()

    if os.environ.get("RANK", "0") == "0":
        sys.addaudithook(watch)
    return train.train(config, run_dir)


def die_in_a_weight_part(config: Any, run_dir: Path) -> int:
    """The launcher and the ranks are killed while the faulty rank computes deferred wgrads."""

    def prepare(engine: Any) -> None:
        optimizer, calls = engine.optimizer, 0
        inner = optimizer.add

        def add(*gradient: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 7:
                os.kill(_launcher(), signal.SIGKILL)
                signal.pause()
            inner(*gradient)

        optimizer.add = add

    return _train(config, run_dir, prepare)


TRACED = "MEGADS_TESTS_TRACED"
"""Environment variable: a `Traced` as JSON."""


@dataclass(frozen=True)
class Traced:
    """A process whose system calls are traced.

    Attributes:
        role: launcher, or rank or writer and its number: "writer 0".
        folder: the run directory.
        log: see `tests.system_calls.trace_this_process`.
        label, number: the point at which it is killed.
    """

    role: str
    folder: str
    log: str
    label: str = ""
    number: int = 0

    def trace(self, role: str) -> None:
        """Starts tracing if this process has the role."""
        if role == self.role:
            point, messages = Point(self.label, self.number), not role.startswith("launcher")
            trace_this_process(Path(self.folder), Path(self.log), point, messages)


def die_at_a_call(config: Any, run_dir: Path) -> int:
    """The launcher, a rank or its writer is killed right before a system call that changes the run directory."""
    from megads.checkpoint import writer
    from megads.train import loop as train

    traced, rank, serve = Traced(**json.loads(os.environ[TRACED])), os.environ.get("RANK", "0"), writer._serve

    def serve_traced(*arguments: Any) -> Any:
        traced.trace(f"writer {rank}")
        serve(*arguments)

    writer._serve = serve_traced  # type: ignore[assignment]
    traced.trace(f"rank {rank}")
    return train.train(config, run_dir)


LAUNCHER = "MEGADS_TESTS_LAUNCHER"
"""Environment variable: pid of the launcher, with which the ranks die."""


def _launcher() -> int:
    return int(os.environ[LAUNCHER])


def _train(config: Any, run_dir: Path, break_engine: Callable[[Any], Any], at: int = FAULTY_STEP) -> int:
    """Trains; the faulty rank's engine is broken just before step `at`, counted from this start."""
    from megads.train import loop as train

    build = train.build_engine

    def build_broken(run: Any, *more: Any, **options: Any) -> Any:
        engine = build(run, *more, **options)
        if run.grid.rank == FAULTY_RANK:
            _before_step(engine, at, lambda: break_engine(engine))
        return engine

    train.build_engine = build_broken
    return train.train(config, run_dir)


def _before_step(engine: Any, step: int, action: Callable[[], Any]) -> None:
    inner, done = engine.step, 0

    def stepped(micro_batches: Sequence[Any], learning_rate: float) -> Any:
        nonlocal done
        done += 1
        if done == step:
            action()
        return inner(micro_batches, learning_rate)

    engine.step = stepped


def _stage(engine: Any) -> Any:
    """The last of the rank's layers, in its last virtual stage, that has parameters of its own."""
    *_, layers = engine.module.chunks.values()
    return [layer for layer in layers if list(layer.parameters())][-1]


def _parameter(engine: Any, name: str = "qkv.weight") -> Any:
    """The first parameter on the rank whose key ends in `name`."""
    return next(p for p in engine.module.parameters() if p.placement.key.endswith(name))


def main() -> None:
    """Runs the command line that follows the fault's name."""
    import dataclasses

    import megads.launch.attempts as attempts
    from megads.cli.main import run

    fault, *arguments = sys.argv[1:]
    launch_spec = attempts.launch_spec

    def with_entry(config: Any) -> Any:
        spec = launch_spec(config)
        return dataclasses.replace(spec, command=(*spec.command, "--entry", f"tests.faults:{fault}"))

    attempts.launch_spec = with_entry
    os.environ[LAUNCHER] = str(os.getpid())
    if TRACED in os.environ:
        Traced(**json.loads(os.environ[TRACED])).trace("launcher")
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
