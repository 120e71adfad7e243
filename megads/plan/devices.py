"""Devices on which a step is planned: peaks, bandwidths and the shares of them that operators reach.

Peaks are the vendors' (dense bf16, without sparsity); bandwidths count one direction. Five shares are calibrated on
published steps of whole trainings, where GPUs run at their power limit and networks are busy: `matmul_efficiency` of
A100 and H100, `memory_efficiency`, `nic_efficiency`, and `JITTER` of megads.plan.step_estimate (docs/planning.md);
others come from the measurements named beside them, or all of them from a file (`read_device`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megads.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One rank's device, its node and its network.

    Attributes:
        name: as in device=<name>.
        peak_tflops: dense bf16.
        memory_gib: that programs can allocate.
        memory_gigabytes_per_s: of its memory.
        processors: streaming multiprocessors or compute units, over which a product's tiles are spread.
        ranks_per_node: devices that `node_gigabytes_per_s` connects.
        node_gigabytes_per_s: of one device to the others of its node, one direction.
        nic_gigabytes_per_s: of the network for each device, one direction.
        host_gigabytes_per_s: to the host's memory, one direction: what saves are copied over.
        matmul_efficiency: share of the peak that the largest matrix products reach.
        attention_efficiency: share of the peak that a flash kernel reaches forward and backward, causal work counted
            once.
        memory_efficiency: share of the memory's bandwidth that elementwise kernels reach.
        link_efficiency: share of `node_gigabytes_per_s` that collectives reach (NCCL's bus bandwidth).
        nic_efficiency: likewise of `nic_gigabytes_per_s`.
        node_latency_us: of one step of a collective inside a node.
        nic_latency_us: of one step between nodes.
        kernel_us: least time of a kernel.
        fp32_tflops: peak in fp32.
        on_cpu: ranks share a machine's memory and compute on its cores.
        products: measured matrix products (m, n, k, TFLOPs); where there are some they replace `matmul_efficiency`.
    """

    name: str
    peak_tflops: float
    memory_gib: float
    memory_gigabytes_per_s: float
    processors: int
    ranks_per_node: int
    node_gigabytes_per_s: float
    nic_gigabytes_per_s: float
    host_gigabytes_per_s: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float = 0.67
    link_efficiency: float = 0.78
    nic_efficiency: float = 0.65
    node_latency_us: float = 3.0
    nic_latency_us: float = 8.0
    kernel_us: float = 5.0
    fp32_tflops: float | None = None
    on_cpu: bool = False
    products: tuple[tuple[int, int, int, float], ...] = ()

    def in_fp32(self) -> Device:
        """The same device for products in fp32.

        Raises:
            ConfigError: its peak in fp32 is not known.
        """
        if self.fp32_tflops is None:
            raise ConfigError(f"device = {self.name}: its peak in fp32 is not known; set train.precision=bf16")
        return replace(self, peak_tflops=self.fp32_tflops)

    @property
    def peak_flops(self) -> float:
        return self.peak_tflops * 1e12

    @property
    def memory_bytes_per_s(self) -> float:
        """That elementwise kernels reach."""
        return self.memory_gigabytes_per_s * 1e9 * self.memory_efficiency

    @property
    def node_bytes_per_s(self) -> float:
        """That collectives inside a node reach."""
        return self.node_gigabytes_per_s * 1e9 * self.link_efficiency

    @property
    def nic_bytes_per_s(self) -> float:
        """That collectives between nodes reach, of one device."""
        return self.nic_gigabytes_per_s * 1e9 * self.nic_efficiency


_A100 = Device(
    # NVIDIA A100 datasheet (2021): 312 TFLOPS bf16, 600 GB/s NVLink both ways together; 108 SMs (Ampere whitepaper).
    # DGX A100: one HDR InfiniBand port of 200 Gb/s a GPU; PCIe 4.0 x16 to the host, 31.5 GB/s.
    # 39.4 and 79.2 GiB: what nvidia-smi shows less what the driver reserves.
    name="a100_80gb",
    peak_tflops=312.0,
    memory_gib=79.2,
    memory_gigabytes_per_s=2039.0,
    processors=108,
    ranks_per_node=8,
    node_gigabytes_per_s=300.0,
    nic_gigabytes_per_s=25.0,
    host_gigabytes_per_s=25.0,
    fp32_tflops=19.5,
    matmul_efficiency=0.79,
    # FlashAttention-2 (Dao 2023), figures 4 to 6: 175 to 225 TFLOPs forward and backward, heads of 128, causal.
    attention_efficiency=0.58,
)
_H100 = Device(
    # NVIDIA H100 datasheet (2023): 989.4 TFLOPS bf16, 3.35 TB/s, 900 GB/s NVLink; 132 SMs (Hopper whitepaper).
    # DGX H100: one NDR InfiniBand port of 400 Gb/s a GPU; PCIe 5.0 x16.
    name="h100",
    peak_tflops=989.4,
    memory_gib=79.1,
    memory_gigabytes_per_s=3350.0,
    processors=132,
    ranks_per_node=8,
    node_gigabytes_per_s=450.0,
    nic_gigabytes_per_s=50.0,
    host_gigabytes_per_s=50.0,
    fp32_tflops=67.0,
    matmul_efficiency=0.58,
    # FlashAttention-3 (Shah et al. 2024), figures 5 and 6: cuDNN and FA3 450 to 600 TFLOPs, FA2 about 350.
    attention_efficiency=0.45,
)
DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 datasheet: 40 GB HBM2, 1,555 GB/s.
        replace(_A100, name="a100_40gb", memory_gib=39.4, memory_gigabytes_per_s=1555.0),
        _A100,
        _H100,
        # NVIDIA H200 datasheet (2024): the same chip, 141 GB HBM3e, 4.8 TB/s.
        # KempnerForge reports 10,471 tokens/s of Llama-3-8B on one, 4096 tokens a sample, every block recomputed.
        replace(_H100, name="h200", memory_gib=139.8, memory_gigabytes_per_s=4800.0, matmul_efficiency=0.77),
        # AMD Instinct MI300X data sheet (2023): 1,307.4 TFLOPS bf16, 192 GB, 5.3 TB/s, 304 compute units, seven
        # Infinity Fabric links of 128 GB/s both ways together. Products at about half the peak, attention at a third:
        # AMD's ROCm blog, "Measuring Max-Achievable FLOPs" (2025), and its Megatron-LM results.
        Device(
            name="mi300x",
            peak_tflops=1307.4,
            memory_gib=191.0,
            memory_gigabytes_per_s=5300.0,
            processors=304,
            ranks_per_node=8,
            node_gigabytes_per_s=448.0,
            nic_gigabytes_per_s=50.0,
            host_gigabytes_per_s=50.0,
            fp32_tflops=163.4,
            matmul_efficiency=0.50,
            attention_efficiency=0.30,
        ),
    )
}
"""By name, SXM or OAM modules in nodes of 8."""

_FILE_ENDS = (".yaml", ".yml", ".json")


def is_file(name: str) -> bool:
    """Whether device=<name> means a file."""
    return name.endswith(_FILE_ENDS)


def find_device(name: str) -> Device:
    """The device of a name, or of a file that `megads calibrate` wrote.

    Raises:
        ConfigError: there is none, or the file is none of a device.
    """
    if is_file(name):
        return read_device(Path(name))
    if name not in DEVICES:
        raise ConfigError(
            f"device = {name}: must be auto, cpu, cuda, one of {', '.join(DEVICES)}, or a file that megads calibrate "
            "wrote (.yaml)"
        )
    return DEVICES[name]


def read_device(path: Path) -> Device:
    """Reads a device from YAML: the attributes of `Device`, those of `like: <name>` where they are left out.

    Raises:
        ConfigError: the file cannot be read, or a value is none.
    """
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"device = {path} cannot be read ({error}): give a device's name or a YAML file") from error
    if not isinstance(found, dict):
        raise ConfigError(f"device = {path}: must hold the attributes of a device, as megads calibrate writes them")
    known = {field.name for field in fields(Device)}
    base: dict[str, Any] = {"name": path.stem}
    if "like" in found:
        like = find_device(str(found["like"]))
        base = {name: getattr(like, name) for name in known} | base
    own = {key: value for key, value in found.items() if key != "like"}
    unknown = sorted(str(key) for key in own if key not in known)
    values = base | own
    missing = sorted(field.name for field in fields(Device) if field.name not in values and field.name in _REQUIRED)
    if unknown or missing:
        what = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"device = {path}: {what}; megads calibrate writes such a file, like: h100 fills in the rest")
    values["products"] = tuple((int(m), int(n), int(k), float(t)) for m, n, k, t in values.get("products", ()))
    numbers = {key: value for key, value in values.items() if key not in _NOT_NUMBERS and value is not None}
    wrong = [key for key, value in numbers.items() if not (_is_number(value) and value > 0)]
    if wrong:
        raise ConfigError(f"device = {path}: {wrong[0]} = {values[wrong[0]]}: must be a number above 0")
    return Device(**values)


_NOT_NUMBERS = {"name", "products", "on_cpu"}
_REQUIRED = {
    "peak_tflops",
    "memory_gib",
    "memory_gigabytes_per_s",
    "processors",
    "ranks_per_node",
    "node_gigabytes_per_s",
    "nic_gigabytes_per_s",
    "host_gigabytes_per_s",
    "matmul_efficiency",
    "attention_efficiency",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
