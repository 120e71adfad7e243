"""DeepSpeed's AdamW kernels (optim.impl=deepspeed): CPUAdam for master weights on a CPU, FusedAdam on a GPU.

Only the kernels are DeepSpeed's. Master weights, moments and step count are stored as for every other optimizer, so
checkpoints are the same, and a run can continue with another optim.impl. PyTorch compiles the kernels at first use and
caches them in megads' cache folder, or in TORCH_EXTENSIONS_DIR; `python -m megads.engine.deepspeed_adam cpu|cuda` does
so before the ranks start.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from subprocess import CalledProcessError
from typing import Any

import torch

from megads.errors import EXIT_OK, ConfigError
from megads.ops.compiler import compiled_alone
from megads.ops.config import Implementation
from megads.optim.config import OptimConfig
from megads.optim.masters import MasterUpdate, UpdateRule

_CHUNK = 2**16
"""Chunk size of FusedAdam's multi-tensor kernel, in elements, as in DeepSpeed's optimizer."""
_ADAMW_MODE = 1
"""Mode of FusedAdam: decoupled weight decay; 0 is Adam with an L2 penalty."""
_ids = itertools.count()


def deepspeed_adamw(optim: OptimConfig, device: torch.device) -> UpdateRule | None:
    """Returns DeepSpeed's AdamW if optim.impl=deepspeed, else None.

    Raises:
        ConfigError: see `load_adam`.
    """
    return DeepSpeedAdamW(optim, device) if optim.impl is Implementation.deepspeed else None


class DeepSpeedAdamW:
    """AdamW on flat fp32 masters; an `UpdateRule`.

    Args:
        optim: decay rates of the moments and eps.
        device: of the masters.

    Raises:
        ConfigError: see `load_adam`.
    """

    def __init__(self, optim: OptimConfig, device: torch.device) -> None:
        (self._beta1, self._beta2), self._eps = optim.betas, optim.eps
        self._cuda = device.type == "cuda"
        self._op, self._id = load_adam(cuda=self._cuda), next(_ids)

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        if self._cuda:
            for update in updates:
                self._on_gpu(update)
            return
        for update in updates:
            self._on_cpu(update)

    def _on_cpu(self, update: MasterUpdate) -> None:
        """Updates one master.

        CPUAdam updates the powers of the decay rates by multiplication in every step, but computes them with pow() in
        its first step, so a resumed run would not be bitwise identical. Therefore every step creates a new object.
        """
        betas = (self._beta1, self._beta2)
        self._op.create_adam(self._id, update.lr, *betas, self._eps, update.weight_decay, True, False)
        bias_correction = True
        self._op.adam_update(
            self._id, update.step, update.lr, *betas, self._eps, update.weight_decay, bias_correction, update.master,
            update.grad, update.state["exp_avg"], update.state["exp_avg_sq"],
        )  # fmt: skip

    def _on_gpu(self, update: MasterUpdate) -> None:
        overflow = torch.zeros(1, dtype=torch.int32, device=update.master.device)  # required; never set here
        lists = [[update.grad], [update.master], [update.state["exp_avg"]], [update.state["exp_avg_sq"]]]
        bias_correction = 1
        self._op.multi_tensor_adam(
            _CHUNK, overflow, lists, update.lr, self._beta1, self._beta2, self._eps, update.step, _ADAMW_MODE,
            bias_correction, update.weight_decay,
        )  # fmt: skip

    def __del__(self) -> None:
        op = getattr(self, "_op", None)
        if op is not None and not self._cuda:
            op.destroy_adam(self._id)


def load_adam(*, cuda: bool) -> Any:
    """Returns the extension module of DeepSpeed's CPUAdam or FusedAdam; compiles it if it is not in torch's cache.

    Raises:
        ConfigError: it cannot be compiled or loaded on this machine.
    """
    # Imported here, as the native engine imports this module and needs no DeepSpeed.
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    name, builder = ("FusedAdam", FusedAdamBuilder) if cuda else ("CPUAdam", CPUAdamBuilder)
    try:
        with compiled_alone():
            return builder().load(verbose=False)
    except (RuntimeError, ImportError, OSError, CalledProcessError) as error:
        message = f"optim.impl = deepspeed cannot run: DeepSpeed's {name} cannot be compiled or loaded ({error})"
        raise ConfigError(f"{message}; use optim.impl=auto") from error


def main(arguments: Sequence[str]) -> int:
    """Compiles the kernels; returns the exit code."""
    try:
        load_adam(cuda=list(arguments) == ["cuda"])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
