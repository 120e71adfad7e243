"""A fake GPU: training steps of any rank of any world on tensors with a shape, dtype and device, but no values.

Tensors on `cuda` are torch's FakeTensors; the process groups are torch's fake ones, which do nothing. Tensors on the
CPU are real. What fails on a real GPU or in NCCL, or blocks the host, raises where it happens: operators that read
tensors of two devices, the host reading or copying a result of the device, a blocking copy to the device, a CPU tensor
passed to NCCL, a megads operator without a CUDA implementation. What torch needs from the driver is in `fake_cuda.cpp`.

`FakeGpus` is for tests: it starts a process that has such a GPU, and forks it for every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import multiprocessing as mp
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from megads.ops.build import find_compiler, includes, run_compiler, sources_dir, torch_dir
from megads.runtime.environment import user_cache_dir

SOURCE = Path(__file__).with_suffix(".cpp")
PRELOADED = [
    "tests.deepspeed_import",
    "deepspeed.compile.backend",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "megads.engine.native_engine",
    "megads.engine.zero_engine",
    "torch._dynamo",
]
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operators that return a value to the host."""
SAME_DEVICE = ("_fused_", "_foreach_")
"""Prefixes of operators whose kernels need scalar tensors on the device, too."""
LAUNCHES_NOTHING = {
    *("detach", "device", "lift_fresh", "set_", "_unsafe_view", "new_zeros"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operators without a kernel, in addition to views. `new_zeros` are scalars with which FlexAttention, which is not
compiled here, traces its functions."""
IN_PYTHON = {"linear_backward"}
"""Operators of megads that are written in Python, for any device."""
NOTHING = (
    *("_lazy_init", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("empty_cache", "manual_seed", "manual_seed_all"),
)
ZERO = (
    "current_device",
    *(f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved", "cached")),
)
"""Functions of torch.cuda that return None (NOTHING) or 0 (ZERO)."""
BOOT = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
import torch
library.install_guard()
from tests.engine.fake_cuda import serve
serve(int(sys.argv[2]))
"""


class GpuFault(Exception):
    """An operation that a GPU or NCCL refuses, or that blocks the host."""


@dataclass(frozen=True)
class Call:
    """An operation, recorded in the order in which the host issues it.

    Attributes:
        name: operator or method, as in "c10d::allreduce_", "stream.wait_stream", "event.record".
        stream: number of the current stream, 0 for the default one.
        group: name of a collective's process group.
        tensors: tensors of a collective.
        other: number of the other stream or event.
    """

    name: str
    stream: int
    group: str = ""
    tensors: tuple[Tensor, ...] = field(default=(), compare=False)
    other: int | None = None


class FakeGpu(TorchDispatchMode):
    """The GPU of one rank.

    Attributes:
        calls: collectives, and operations on streams and events.
        waits: places where the host waited, and how often.
        forbids_waits: whether a wait raises; else it is counted, and a number that is read is 1, a flag 0.
        gloo: names of groups that carry CPU tensors.
        launched: operators that launch kernels, and how often: at least one kernel each. Transfers from the host and
            collectives are operators, too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = torch.device("cuda", 0)
        self.calls: list[Call] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.forbids_waits = False
        self.gloo: set[str] = set()
        self.stream = FakeStream(self, 0)
        self._default_stream, self._streams = self.stream, 0
        self._pinned = WeakTensorKeyDictionary()
        self._slabs: dict[int, Tensor] = {}  # pinned when they were allocated, by storage: parts of them are, too
        self._own = own_operators() | IN_PYTHON
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.launched[func.name()] += 1
            with self.fake:
                return func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        flat = tree_flatten((args, kwargs))[0]
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if namespace == "c10d":
            self.launched[name] += 1
            return self._collective(func, args, kwargs, flat, tensors)
        if name == "_pin_memory":
            pinned = args[0].clone()
            self._pinned[pinned] = True
            return pinned
        if kwargs.get("pin_memory"):
            slab = func(*args, **kwargs | {"pin_memory": False})
            self._slabs[slab.untyped_storage()._cdata] = slab
            return slab
        on_gpu = [x for x in tensors if isinstance(x, FakeTensor)]
        if not on_gpu:
            target = kwargs.get("device")
            if target is None or torch.device(target).type != "cuda":
                return func(*args, **kwargs)
            if tensors:
                self._copied_in(tensors[0], kwargs.get("non_blocking", False))
            self._count(func, name)
            with self.fake:
                return func(*args, **kwargs)
        self._count(func, name)
        if name in READS:
            self._wait(f"{name} of a tensor on the device")
            if name != "_local_scalar_dense":
                return name == "equal"
            # Flags, such as those of an overflow, are not set.
            return torch.full((), args[0].dtype.itemsize > 1, dtype=args[0].dtype).item()
        copied = self._copy(name, args, kwargs)
        if copied is not None:
            return copied
        self._check_devices(namespace, name, tensors)
        if func is torch.ops.aten.addmm.dtype_out:  # torch has no fake implementation of it
            return kwargs["out"]
        return func(*args, **kwargs)

    def _count(self, func: Any, name: str) -> None:
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view and name not in LAUNCHES_NOTHING:
            self.launched[name] += 1

    def _copy(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Returns the result of a copy between CPU and device, None for any other operator."""
        if name == "_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            self._wait("copy to the CPU")
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "copy_":
            target, source = args[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if not isinstance(target, FakeTensor):
                if not (non_blocking and self._is_pinned(target)):
                    self._wait("copy to the CPU")
                return target.fill_(1)
            if not isinstance(source, FakeTensor):
                self._copied_in(source, non_blocking)
                return target
        return None

    def _is_pinned(self, x: Tensor) -> bool:
        return x in self._pinned or x.untyped_storage()._cdata in self._slabs

    def _copied_in(self, source: Tensor, non_blocking: bool) -> None:
        if not (non_blocking and self._is_pinned(source)):
            self._wait("copy to the device, of memory that is not pinned, or waiting")

    def _check_devices(self, namespace: str, name: str, tensors: list[Tensor]) -> None:
        strict = name.startswith(SAME_DEVICE)
        for x in tensors:
            if not isinstance(x, FakeTensor) and (strict or x.dim()):
                raise GpuFault(
                    f"{namespace}::{name} reads a tensor {list(x.shape)} on the CPU beside ones on the device"
                )
        if namespace == "megads" and name not in self._own:
            raise GpuFault(f"megads::{name} has no CUDA implementation")

    def _collective(self, func: Any, args: Any, kwargs: Any, flat: list[Any], tensors: list[Tensor]) -> Any:
        name = func._schema.name
        scripted = next(
            (x for x in flat if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())), None
        )
        group = dist.ProcessGroup.unbox(scripted).group_name if scripted is not None else ""
        # The tensor of a barrier carries no data.
        if group not in self.gloo and name != "c10d::barrier":
            for x in tensors:
                if x.device.type != "cuda":
                    raise GpuFault(f"{name}: NCCL was handed a tensor {list(x.shape)} on the {x.device.type}")
                if not x.is_contiguous():
                    raise GpuFault(f"{name}: NCCL wants contiguous tensors, not strides {x.stride()}")
        self.calls.append(Call(name, self.stream.number, group, tuple(tensors)))
        return func(*args, **kwargs)

    def _wait(self, what: str) -> None:
        frames = reversed(traceback.extract_stack())
        frame = next(f for f in frames if "/torch/" not in f.filename and f.filename != __file__)
        file = path_in_package(Path(frame.filename))
        if self.forbids_waits:
            raise GpuFault(f"the host waits: {what}, at {file}:{frame.lineno} in {frame.name}")
        self.waits[file, frame.name] += 1

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Raises GpuFault where the host waits inside this context."""
        self.forbids_waits = True
        try:
            yield
        finally:
            self.forbids_waits = False

    def new_stream(self, *_args: Any, **_kwargs: Any) -> FakeStream:
        """Stands in for torch.cuda.Stream."""
        self._streams += 1
        return FakeStream(self, self._streams)

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Stands in for torch.cuda.stream."""
        before = self.stream
        self.stream = stream or before
        try:
            yield
        finally:
            self.stream = before

    def synchronize(self, *_args: Any) -> None:
        """Stands in for torch.cuda.synchronize."""
        self._wait("synchronize")

    def runtime(self) -> dict[str, Any]:
        """Returns the replacements for functions of torch.cuda, by name."""
        properties = SimpleNamespace(name="fake", total_memory=2**37, major=9, minor=0, multi_processor_count=132)
        constants = (
            dict.fromkeys(NOTHING)
            | dict.fromkeys(ZERO, 0)
            | {
                "is_available": True,
                "is_initialized": True,
                "device_count": 1,
                "get_device_name": properties.name,
                "get_device_properties": properties,
                "get_device_capability": (9, 0),
                "is_bf16_supported": True,
                "is_current_stream_capturing": False,
                "mem_get_info": (2**37, 2**37),
                "memory_stats": Counter(),
                "graph_pool_handle": (0, 0),
            }
        )
        return {name: _returns(value) for name, value in constants.items()} | {
            "Stream": self.new_stream,
            "Event": lambda *_, **__: FakeEvent(self),
            "stream": self.on_stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "current_stream": lambda *_: self.stream,
            "default_stream": lambda *_: self._default_stream,
            "synchronize": self.synchronize,
            "nvtx": SimpleNamespace(range_push=_returns(None), range_pop=_returns(None)),
        }

    def install(self) -> None:
        """Permanently replaces functions of torch.cuda and the creation of process groups in this process."""
        for name, stand_in in self.runtime().items():
            setattr(torch.cuda, name, stand_in)
        Tensor.record_stream = lambda x, stream: None
        # nn.Module.to would swap parameters that are FakeTensors, which any other reference to them forbids; it sets
        # `data` of those on a GPU.
        torch.utils.swap_tensors = lambda old, new: setattr(old, "data", new.data)
        # No real tensor can be created on the device, whatever torch.cuda reports.
        FakeTensorMode.avoid_device_init = True
        # torch.tensor(..., device="cuda") then creates a tensor on the CPU and copies it, which this mode intercepts.
        torch._C._set_only_lift_cpu_tensors(True)
        new_group = dist.new_group

        def fake_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
            group = new_group(*args, **kwargs)
            if backend == "gloo" and isinstance(group, dist.ProcessGroup):
                self.gloo.add(group.group_name)
            return group

        dist.new_group = fake_group


def _returns(value: Any) -> Callable[..., Any]:
    """Returns a new function each time: torch tells functions of torch.cuda apart by identity."""
    return lambda *_args, **_kwargs: value


class FakeStream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self._gpu, self.number = gpu, number
        self.device, self.device_index, self.cuda_stream = torch.device("cuda", 0), 0, number

    def _note(self, name: str, other: int | None) -> None:
        self._gpu.calls.append(Call(f"stream.{name}", self.number, other=other))

    def wait_stream(self, stream: FakeStream) -> None:
        self._note("wait_stream", stream.number)

    def wait_event(self, event: FakeEvent) -> None:
        self._note("wait_event", id(event))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.synchronize()

    def query(self) -> bool:
        return True


class FakeEvent:
    """Stands in for torch.cuda.Event."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def _note(self, name: str, stream: FakeStream | None) -> None:
        self._gpu.calls.append(Call(f"event.{name}", (stream or self._gpu.stream).number, other=id(self)))

    def record(self, stream: FakeStream | None = None) -> None:
        self._note("record", stream)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._note("wait", stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.synchronize()

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.0


def own_operators() -> frozenset[str]:
    """Names of megads' operators that have a CUDA implementation, from the bindings' source."""
    sources = (sources_dir() / "bindings" / "cuda").glob("*.cpp")
    return frozenset(name for path in sources for name in re.findall(r'impl\("(\w+)"', path.read_text()))


def runtime_library() -> Path:
    """Compiles `fake_cuda.cpp` once into the user's cache and returns its path."""
    # The path of torch's libraries is fixed at link time, and several environments may share a home directory.
    parts = (find_compiler(), torch.__version__, torch_dir(), SOURCE.read_text())
    library = user_cache_dir() / "fake_cuda" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made, libraries = library.with_suffix(f".{os.getpid()}"), torch_dir() / "lib"
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        linked = ["-lc10", "-ltorch_cpu", "-o", str(made)]
        run_compiler([find_compiler(), *flags, *includes(), str(SOURCE), *linked])
        made.replace(library)
    return library


class FakeGpus:
    """Runs functions on ranks that have a fake GPU each; used in a `with` block."""

    def __enter__(self) -> FakeGpus:
        self._start()
        return self

    def _start(self) -> None:
        root = str(Path(__file__).parents[2])
        self._connection, theirs = mp.Pipe()
        variables = {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
        command = [sys.executable, "-c", BOOT, str(runtime_library()), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=os.environ | variables, cwd=root, stdout=subprocess.DEVNULL
        )
        theirs.close()

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait(30)

    def run(self, fn: Callable[..., Any], rank: int, world_size: int, *args: Any, timeout_s: float = 600.0) -> Any:
        """Calls fn(gpu, *args) on one rank of a world whose other ranks do not exist; returns its result.

        Raises:
            AssertionError: with the rank's traceback.
        """
        self._connection.send((fn, rank, world_size, args))
        if not self._connection.poll(timeout_s):
            # A late answer would be taken for that of the next rank.
            self._process.kill()
            self.__exit__()
            self._start()
            raise AssertionError(f"rank {rank} did not end within {timeout_s} s")
        ok, value = self._connection.recv()
        assert ok, value
        return value


def path_in_package(file: Path) -> str:
    """Returns a source file's path below its outermost package, with the package's name unless that is megads.

    Goes by the packages, not by the names of folders: a checkout folder is named megads, too.
    """
    root = file.parent
    while (root / "__init__.py").exists():
        root = root.parent
    return str(file.relative_to(root)).removeprefix("megads/")


def serve(descriptor: int) -> None:
    """Forks one rank for every request, one at a time."""
    # Compiled functions compute the same on the same devices; DeepSpeed compiles functions when it is imported.
    torch.compile = lambda fn=None, **_: fn if fn is not None else lambda inner: inner
    for module in PRELOADED:
        importlib.import_module(module)
    connection = Connection(descriptor)
    while True:
        try:
            fn, rank, world_size, args = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            connection.send(_outcome(fn, rank, world_size, args))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            connection.send((False, "the process died"))


def _outcome(fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...]) -> tuple[bool, Any]:
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    # Ranks that do not exist cannot confirm that they run the same model.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _ints: None
    gpu = FakeGpu()
    gpu.install()
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        with gpu:
            return True, fn(gpu, *args)
    except BaseException:
        return False, traceback.format_exc()
