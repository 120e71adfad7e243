"""Devices on which a step is planned: peaks, bandwidths and the shares of them that operators reach.

Peaks are the vendors' (dense bf16, without sparsity); bandwidths count one direction. Five shares are calibrated on
published steps of whole trainings, where GPUs run at their power limit and networks are busy: `matmul_efficiency` of
A100 and H100, `memory_efficiency`, `nic_efficiency`, and `JITTER` of megads.plan.step_estimate (docs/planning.md);
others come from the measurements named beside them, or all of them from a file (`read_device`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from megads.errors import ConfigError
from megads.plan.measured_rates import MeasuredProduct


@dataclass(frozen=True)
class PassCosts:
    """What a pass over layers takes beside its products and attention, as megads calibrate measures it.

    Attributes:
        block_us: of a block whatever its size: Python, autograd, launches.
        pass_us: likewise of a pass.
        gigabytes_per_s: of what elementwise kernels read and write.
        logit_ns: of a logit of the loss.
    """

    block_us: float
    pass_us: float
    gigabytes_per_s: float
    logit_ns: float


@dataclass(frozen=True)
class LayoutCosts:
    """What a block takes more of a micro-batch in a layout than its messages, as megads calibrate measures it.

    Attributes:
        layout: zero_2 and zero_3; tp, sp (with sequence_parallel), sp_chunks (in several tp_chunks) and cp;
            recompute_selective and recompute_full: more than the forward pass again, on a GPU of its host alone; pp: of
            a rank, whatever its stages; split: of schedules that split backward passes, beside that.
        block_us: of a block whatever its size: hooks, calls.
        element_ns: of a parameter of the block under ZeRO, else of an element of its input: copies, casts.
    """

    layout: str
    block_us: float
    element_ns: float


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective between the ranks of a node.

    Attributes:
        name: all_reduce, all_gather (a reduce_scatter likewise), message.
        width: bytes of an element.
        latency_us: of a step of its ring.
        gigabytes_per_s: of its bus.
    """

    name: str
    width: int
    latency_us: float
    gigabytes_per_s: float


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
        input_products, weight_products: likewise of gradients of inputs, and of weights with their fp32 sum; without
            any, `products` count.
        attention_rates: measured attention (tokens a sample, TFLOPs forward, backward), hidden scores not counted;
            instead of `attention_efficiency`.
        alibi_attention_rates: likewise of attention with ALiBi, where another kernel computes it.
        repeatable_attention_rates: of a kernel that gives the same bits on every run, and knows ALiBi: features of a
            head, TFLOPs forward, backward. Without any, the other rates count.
        forward_costs, backward_costs: what passes take beside both; None: elementwise kernels reach
            `memory_efficiency`.
        forward_launch_us, backward_launch_us: what the host takes to launch a block's passes, where those costs are
            None.
        update_ns: of a parameter in the optimizer's step; None: its traffic counts.
        step_us: of a step whatever it holds.
        collectives: measured ones, instead of `node_gigabytes_per_s` and `node_latency_us`.
        layout_costs: of layouts, measured between the ranks of a node.
        hidden_cost: share of a collective's time that it takes from the work beside it.
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
    products: tuple[MeasuredProduct, ...] = ()
    input_products: tuple[MeasuredProduct, ...] = ()
    weight_products: tuple[MeasuredProduct, ...] = ()
    attention_rates: tuple[tuple[int, float, float], ...] = ()
    alibi_attention_rates: tuple[tuple[int, float, float], ...] = ()
    repeatable_attention_rates: tuple[tuple[int, float, float], ...] = ()
    forward_costs: PassCosts | None = None
    backward_costs: PassCosts | None = None
    forward_launch_us: float = 0.0
    backward_launch_us: float = 0.0
    update_ns: float | None = None
    step_us: float = 0.0
    collectives: tuple[MeasuredCollective, ...] = ()
    layout_costs: tuple[LayoutCosts, ...] = ()
    hidden_cost: float = 0.2

    def in_fp32(self) -> Device:
        """The same device for products in fp32.

        Raises:
            ConfigError: its peak in fp32 is not known.
        """
        if self.fp32_tflops is None:
            raise ConfigError(f"device = {self.name}: its peak in fp32 is not known; set train.precision=bf16")
        return replace(self, peak_tflops=self.fp32_tflops)

    def layout_seconds(self, layout: str, elements: float) -> float:
        """What a block of so many elements takes more in a layout; 0 where that was not measured."""
        return sum(
            1e-6 * costs.block_us + 1e-9 * costs.element_ns * elements
            for costs in self.layout_costs
            if costs.layout == layout
        )

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


_FORWARD_LAUNCH_US, _BACKWARD_LAUNCH_US = 570.0, 760.0
"""Of a host beside one H200: 24 blocks of 1,024 features and 8 micro-batches of one sample took 238 to 300 ms a step,
for which the GPU needs 150 (docs/performance.md); shared out as `megads calibrate` found it there."""
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
    forward_launch_us=_FORWARD_LAUNCH_US,
    backward_launch_us=_BACKWARD_LAUNCH_US,
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
    forward_launch_us=_FORWARD_LAUNCH_US,
    backward_launch_us=_BACKWARD_LAUNCH_US,
    fp32_tflops=67.0,
    matmul_efficiency=0.64,
    # FlashAttention-3 (Shah et al. 2024), figures 5 and 6: cuDNN and FA3 450 to 600 TFLOPs, FA2 about 350.
    attention_efficiency=0.45,
    # FlexAttention of torch 2.11 on one H200, 2048 tokens a sample, in profiles of steps (docs/performance.md).
    repeatable_attention_rates=((64, 267.0, 192.0), (128, 284.0, 254.0)),
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
            forward_launch_us=_FORWARD_LAUNCH_US,
            backward_launch_us=_BACKWARD_LAUNCH_US,
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


def shipped_device(gpu: str) -> str | None:
    """The name in `DEVICES` of a GPU.

    Args:
        gpu: as the driver names it: "NVIDIA H100 80GB HBM3".

    Returns:
        None for one that is not among them, such as a PCIe card, which has other links, or a MIG slice.
    """
    words = set(gpu.lower().replace("-", " ").split())
    if words & {"mig", "pcie", "nvl"}:
        return None
    return next((name for name in DEVICES if words.issuperset(name.split("_"))), None)


def read_device(path: Path) -> Device:
    """Reads a device from YAML: the attributes of `Device`, those of `like: <name>` where they are left out.

    Raises:
        ConfigError: the file cannot be read, or a value is none.
    """
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"device = {path} cannot be read ({error}): give a device's name or a YAML file") from error
    try:
        return device_from(found, path.stem)
    except ConfigError as error:
        raise ConfigError(f"device = {path}: {error}") from error


def device_from(found: Any, name: str) -> Device:
    """A device from what a file holds.

    Args:
        found: attributes of `Device`, and `like`.
        name: of the device, where it has none.

    Raises:
        ConfigError: an attribute is missing, unknown or none.
    """
    if not isinstance(found, dict):
        raise ConfigError("must hold the attributes of a device, as megads calibrate writes them")
    known = {field.name for field in fields(Device)}
    base: dict[str, Any] = {"name": name}
    if "like" in found:
        like = find_device(str(found["like"]))
        base = {name: getattr(like, name) for name in known} | base
    own = {key: value for key, value in found.items() if key != "like"}
    unknown = sorted(str(key) for key in own if key not in known)
    missing = sorted(_REQUIRED - (base | own).keys())
    if unknown or missing:
        what = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"{what}; megads calibrate writes such a file, like: h100 fills in the rest")
    return Device(**(base | {key: _attribute(key, value) for key, value in own.items()}))


_ROWS = {
    "products": "m, n, k and TFLOPs",
    "input_products": "m, n, k and TFLOPs",
    "weight_products": "m, n, k and TFLOPs",
    "attention_rates": "tokens a sample, TFLOPs forward and backward",
    "alibi_attention_rates": "tokens a sample, TFLOPs forward and backward",
    "repeatable_attention_rates": "features of a head, TFLOPs forward and backward",
    "collectives": "a name, bytes of an element, microseconds of latency and GB/s",
    "layout_costs": "a layout, microseconds of a block and nanoseconds of an element",
}
"""Attributes that are lists of rows, and what a row has."""
_NAMED = ("collectives", "layout_costs")
"""Those whose rows begin with a name."""
_OPTIONAL = ("fp32_tflops", "update_ns", "forward_costs", "backward_costs")
"""Attributes that may be null."""
_MAY_BE_ZERO = ("step_us", "hidden_cost", "forward_launch_us", "backward_launch_us")
_COSTS = tuple(field.name for field in fields(PassCosts))
_REQUIRED = frozenset(
    (
        *("peak_tflops", "memory_gib", "memory_gigabytes_per_s", "processors", "ranks_per_node"),
        *("node_gigabytes_per_s", "nic_gigabytes_per_s", "host_gigabytes_per_s"),
        *("matmul_efficiency", "attention_efficiency"),
    )
)


def _attribute(key: str, value: Any) -> Any:
    """A value as `Device` has it.

    Raises:
        ConfigError: it is none.
    """
    if value is None and key in _OPTIONAL:
        return None
    if key in _ROWS:
        return _rows(key, value)
    if key in ("forward_costs", "backward_costs"):
        if not isinstance(value, dict) or value.keys() != set(_COSTS):
            raise ConfigError(f"{key} = {value}: must have {', '.join(_COSTS)}")
        return PassCosts(**{name: _number(f"{key}.{name}", part, zero=True) for name, part in value.items()})
    if key == "name":
        return str(value)
    if key == "on_cpu":
        if not isinstance(value, bool):
            raise ConfigError(f"{key} = {value}: must be true or false")
        return value
    if key in ("processors", "ranks_per_node") and not isinstance(value, int):
        raise ConfigError(f"{key} = {value}: must be a whole number above 0")
    return _number(key, value, zero=key in _MAY_BE_ZERO)


def _number(key: str, value: Any, *, zero: bool = False) -> Any:
    """Raises ConfigError on what is no number above zero, or none from zero on."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{key} = {value}: must be a number {'from 0 on' if zero else 'above 0'}")
    return value


def _rows(key: str, value: Any) -> tuple[Any, ...]:
    """A list of measurements; raises ConfigError on rows that are none."""
    columns = _ROWS[key].replace(" and ", ", ").split(", ")
    if not isinstance(value, list) or any(not isinstance(row, list) or len(row) != len(columns) for row in value):
        raise ConfigError(f"{key} = {value}: must be a list of rows of {_ROWS[key]}")
    for row in value:
        for column in row[1:] if key in _NAMED else row:
            _number(f"{key}, {row}", column, zero=key == "layout_costs")
    if key == "layout_costs":
        return tuple(LayoutCosts(str(name), *rest) for name, *rest in value)
    if key == "collectives":
        return tuple(MeasuredCollective(str(name), *rest) for name, *rest in value)
    return tuple(tuple(row) for row in value)
