"""Processes that really fail, each in one way: `python -m tests.tools.diagnose.failing <way>`."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path


def crash() -> None:
    """Reads address 0."""
    ctypes.string_at(0)


def port_in_use() -> None:
    """Listens on a port that is in use."""
    from torch.distributed import TCPStore

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


def no_room() -> None:
    """Saves a tensor larger than the file size limit."""
    import torch

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.zeros(1 << 20), Path(folder) / "weights.pt")


def no_memory() -> None:
    """Allocates more memory than the limit of the address space."""
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    torch.zeros(1 << 33)


def truncated_checkpoint() -> None:
    """Loads a checkpoint whose end is missing."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save({"weight": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
        torch.load(path)


def other_model() -> None:
    """Loads the weights of a model of another size."""
    import torch

    torch.nn.Linear(4, 4).load_state_dict(torch.nn.Linear(8, 8).state_dict())


def truncated_safetensors() -> None:
    """Loads a safetensors file whose header is truncated."""
    import torch
    from safetensors.torch import load, save

    load(save({"weight": torch.zeros(1000)})[:30])


def missing_module() -> None:
    """Imports a module that is not installed."""
    import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def wrong_shape() -> None:
    """Multiplies matrices whose shapes do not match."""
    import torch

    torch.nn.Linear(16, 4)(torch.zeros(2, 8))


def token_out_of_range() -> None:
    """Looks up a token beyond the vocabulary."""
    import torch

    torch.nn.Embedding(10, 4)(torch.tensor([11]))


def not_a_number() -> None:
    """Computes a NaN gradient, which detect_anomaly reports."""
    import torch

    weight = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly():
        torch.sqrt(weight * 0).mul(0).sum().backward()


def damaged_archive() -> None:
    """Opens a file that is not an archive."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.zip"
        path.write_bytes(b"nothing of the kind")
        zipfile.ZipFile(path)


def _killed(index: int) -> int:
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


class _Suicidal:
    """A dataset whose fourth sample kills the worker that reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return _killed(index)


def worker_killed() -> None:
    """Reads data with a dataloader worker that is killed."""
    from torch.utils.data import DataLoader

    list(DataLoader(_Suicidal(), num_workers=1))  # type: ignore[arg-type]


def wrong_argument() -> None:
    """Parses an unknown argument."""
    import argparse

    argparse.ArgumentParser().parse_args(["--unknown=1"])


def missing_key() -> None:
    """Reads a missing key."""
    print({}["learning_rate"])


def one_rank_killed() -> None:
    """Under torchrun: rank 1 is killed while rank 0 waits in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_rank_raises() -> None:
    """Under torchrun: rank 1 raises while rank 0 waits in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("learning_rate")
    dist.all_reduce(torch.ones(1))


_WAYS: tuple[Callable[[], None], ...] = (
    crash,
    port_in_use,
    no_room,
    no_memory,
    truncated_checkpoint,
    other_model,
    truncated_safetensors,
    missing_module,
    wrong_shape,
    token_out_of_range,
    not_a_number,
    damaged_archive,
    worker_killed,
    wrong_argument,
    missing_key,
    one_rank_killed,
    one_rank_raises,
)
WAYS = {way.__name__: way for way in _WAYS}

if __name__ == "__main__":
    import faulthandler

    faulthandler.enable()
    WAYS[sys.argv[1]]()
