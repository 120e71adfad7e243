"""Devices for step estimates: peak FLOPs, bandwidths, and the fractions of them that operators achieve.

Peaks are the vendors' (dense bf16, without sparsity); bandwidths are for one direction. Five constants are calibrated
on published step times of whole training runs, where GPUs run at their power limit and networks are busy:
`matmul_efficiency` of A100 and H100, `memory_efficiency`, `nic_efficiency`, and `step_estimate.JITTER`
(docs/notes/step-time.md). The others come from the measurements cited next to them, or all of them from a file
(`read_device`).

Measured operator rates are interpolated by a linear cost model, corrected by nearby measurements: the time of a GEMM
[m, k] x [k, n] is c0 + c1 mnk + c2 mk + c3 nk + c4 mn: call overhead, multiply-adds, and reading, packing and writing
of the three matrices. The coefficients are a non-negative least-squares fit of the relative errors. The residuals of
nearby measurements correct the prediction, weighted by their distance in octaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from math import exp, isfinite, log, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megads.api import ConfigError

if TYPE_CHECKING:
    import numpy as np

MeasuredProduct = tuple[int, int, int, float]
"""(m, n, k, TFLOPs)."""
_NEIGHBOURS = 6
_NEAR = 0.1
"""Distance in octaves below which measurements have nearly the same weight."""


def non_negative(features: np.ndarray, values: np.ndarray, scale_by: np.ndarray) -> list[float]:
    """Non-negative least squares with scaled errors; returns the coefficients.

    Args:
        features: design matrix, [measurements, coefficients].
        values: target values, [measurements].
        scale_by: positive divisors of the errors, [measurements].
    """
    import numpy as np

    count = features.shape[1]
    scale = features.max(axis=0)
    scaled, wanted = features / np.where(scale > 0, scale, 1.0) / scale_by[:, None], values / scale_by
    best = (float("inf"), [0.0] * count)
    # There are few coefficients, so all subsets are tried; the best one without a negative coefficient is used.
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            solution = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < best[0]:
                found = [0.0] * count
                for place, value in zip(chosen, solution, strict=True):
                    found[place] = float(value / scale[place]) if scale[place] > 0 else 0.0
                best = (error, found)
    return best[1]


def _terms(m: float, n: float, k: float) -> tuple[float, float, float, float, float]:
    return 1.0, m * n * k, m * k, n * k, m * n


@lru_cache(maxsize=64)
def _coefficients(products: tuple[MeasuredProduct, ...]) -> tuple[float, ...]:
    import numpy as np

    times = np.array([2 * m * n * k / rate / 1e12 for m, n, k, rate in products])
    return tuple(non_negative(np.array([_terms(m, n, k) for m, n, k, _ in products]), times, times))


def _predicted(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    return sum(c * term for c, term in zip(_coefficients(products), _terms(m, n, k), strict=True))


@lru_cache(maxsize=4096)
def gemm_seconds(products: tuple[MeasuredProduct, ...], m: float, n: float, k: float) -> float:
    """Seconds of a GEMM.

    Args:
        products: measured GEMMs; if there are no more than coefficients, only the nearest one is used.
        m, n, k: dimensions of the GEMM.
    """
    few = len(products) <= len(_terms(1, 1, 1))
    left = []
    for a, b, c, rate in products:
        seconds = 2 * a * b * c / rate / 1e12
        expected = 2 * a * b * c / 1e12 if few else _predicted(products, a, b, c)
        left.append((abs(log2(m / a)) + abs(log2(n / b)) + abs(log2(k / c)), log(seconds / expected)))
    near = sorted(left)[: 1 if few else _NEIGHBOURS]
    shares = [(distance + _NEAR) ** -2 for distance, _ in near]
    correction = exp(sum(share * value for share, (_, value) in zip(shares, near, strict=True)) / sum(shares))
    return correction * (2 * m * n * k / 1e12 if few else _predicted(products, m, n, k))


def between(points: Sequence[tuple[float, float]], place: float) -> float:
    """Log-log linear interpolation between measured points; constant outside their range.

    Args:
        points: (x, value) pairs in ascending order of x, all positive.
        place: x at which to interpolate, positive.
    """
    if place <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if place <= high:
            share = log(place / low) / log(high / low)
            return exp((1 - share) * log(first) + share * log(second))
    return points[-1][1]


@dataclass(frozen=True)
class PassCosts:
    """Costs of a forward or backward pass besides GEMMs and attention, as measured by megads calibrate.

    Attributes:
        block_us: fixed overhead per block: Python, autograd, kernel launches.
        pass_us: fixed overhead per pass.
        gigabytes_per_s: memory bandwidth of elementwise kernels, reads and writes together.
        logit_ns: time per logit of the loss.
    """

    block_us: float
    pass_us: float
    gigabytes_per_s: float
    logit_ns: float


@dataclass(frozen=True)
class LayoutCosts:
    """Overhead of a layout per block and micro-batch, communication excluded, as measured by megads calibrate.

    Attributes:
        layout: zero_2 and zero_3; tp, sp (with sequence_parallel), sp_chunks (with several tp_chunks) and cp;
            recompute_selective and recompute_full: overhead on top of the repeated forward pass, on a GPU host time
            only; pp: overhead per rank, independent of its number of virtual stages; split: additional overhead of
            schedules that split the backward pass.
        block_us: fixed overhead per block: hooks, calls.
        element_ns: time per parameter of the block under ZeRO, otherwise per element of its input: copies, casts.
    """

    layout: str
    block_us: float
    element_ns: float


@dataclass(frozen=True)
class MeasuredCollective:
    """Measured collective or point-to-point transfer between the ranks of a node.

    Attributes:
        name: all_reduce, all_gather, reduce_scatter or message (point-to-point).
        width: bytes per element.
        latency_us: latency of one step of the ring.
        gigabytes_per_s: bus bandwidth.
    """

    name: str
    width: int
    latency_us: float
    gigabytes_per_s: float


@dataclass(frozen=True)
class Device:
    """Compute, memory, intra-node links and network of one rank.

    Attributes:
        name: device name, as in device=<name>.
        peak_tflops: peak TFLOPs in bf16, dense.
        memory_gib: memory that programs can allocate.
        memory_gigabytes_per_s: memory bandwidth.
        processors: number of streaming multiprocessors or compute units, over which a GEMM's tiles are spread.
        ranks_per_node: number of devices that are connected at `node_gigabytes_per_s`.
        node_gigabytes_per_s: bandwidth from one device to the others of its node, one direction.
        nic_gigabytes_per_s: network bandwidth per device, one direction.
        host_gigabytes_per_s: bandwidth to host memory, one direction; checkpoints are copied at this rate.
        matmul_efficiency: fraction of the peak that the largest GEMMs achieve.
        attention_efficiency: fraction of the peak that a flash attention kernel achieves in forward and backward; FLOPs
            masked by causality are not counted.
        memory_efficiency: fraction of the memory bandwidth that elementwise kernels achieve.
        link_efficiency: fraction of `node_gigabytes_per_s` that collectives achieve (NCCL's bus bandwidth).
        nic_efficiency: fraction of `nic_gigabytes_per_s` that collectives achieve.
        node_latency_us: latency of one step of a collective within a node.
        nic_latency_us: latency of one step of a collective between nodes.
        kernel_us: minimum time of a kernel.
        fp32_tflops: peak TFLOPs in fp32.
        fp8_tflops: peak TFLOPs in FP8, dense; None: it has no FP8 GEMMs, or none that megads uses.
        on_cpu: whether ranks compute on a machine's CPU cores and share its memory.
        products: measured forward GEMMs (m, n, k, TFLOPs); if there are any, they replace `matmul_efficiency`.
        input_products, weight_products: measured GEMMs of input gradients, and of weight gradients including fp32
            accumulation; `products` is used if empty.
        attention_rates: measured attention (tokens per sample, TFLOPs forward, TFLOPs backward), masked scores not
            counted; replaces `attention_efficiency`.
        alibi_attention_rates: measured attention with ALiBi, if a different kernel computes it; same columns.
        repeatable_attention_rates: measured attention of a deterministic kernel that supports ALiBi (head dim, TFLOPs
            forward, TFLOPs backward); the other rates are used if empty.
        forward_costs, backward_costs: costs of passes besides GEMMs and attention; None: elementwise kernels achieve
            `memory_efficiency`.
        forward_launch_us, backward_launch_us: host time to launch one block's kernels in each pass, used if the costs
            above are None.
        update_ns: optimizer step time per parameter; None: derived from its memory traffic.
        step_us: fixed overhead per step.
        collectives: measured collectives; replace `node_gigabytes_per_s` and `node_latency_us`.
        layout_costs: overhead of layouts, measured between the ranks of a node.
        hidden_cost: slowdown of the overlapped compute, as a fraction of the collective's time.
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
    fp8_tflops: float | None = None
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
        """The same device with its fp32 peak.

        Raises:
            ConfigError: its fp32 peak is unknown.
        """
        if self.fp32_tflops is None:
            raise ConfigError(f"device = {self.name}: its fp32 peak is unknown; set train.precision=bf16")
        return replace(self, peak_tflops=self.fp32_tflops)

    @property
    def fp8_rate(self) -> float:
        """Rate of FP8 GEMMs relative to others; 1 on CPUs, which emulate them.

        Raises:
            ConfigError: it has no FP8 GEMMs, or their peak is unknown.
        """
        if self.on_cpu:
            return 1.0
        if self.fp8_tflops is None:
            raise ConfigError(
                f"device = {self.name}: it has no FP8 GEMMs, or their peak is unknown; set train.fp8=none, or "
                "fp8_tflops in the file of the device"
            )
        return self.fp8_tflops / self.peak_tflops

    def layout_seconds(self, layout: str, elements: float) -> float:
        """Overhead of a layout for a block of `elements` elements, in seconds; 0 if it was not measured."""
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
        """Memory bandwidth that elementwise kernels achieve."""
        return self.memory_gigabytes_per_s * 1e9 * self.memory_efficiency

    @property
    def node_bytes_per_s(self) -> float:
        """Bus bandwidth that collectives within a node achieve."""
        return self.node_gigabytes_per_s * 1e9 * self.link_efficiency

    @property
    def nic_bytes_per_s(self) -> float:
        """Network bandwidth per device that collectives between nodes achieve."""
        return self.nic_gigabytes_per_s * 1e9 * self.nic_efficiency


_FORWARD_LAUNCH_US, _BACKWARD_LAUNCH_US = 570.0, 760.0
"""Host time per block, measured on the host of one H200: with 24 blocks of hidden size 1,024 and 8 micro-batches of one
sample, a step took 238 to 300 ms, of which the GPU needs 150 ms (docs/notes/performance.md). The split between forward
and backward is what `megads calibrate` measured there."""
_A100 = Device(
    # NVIDIA A100 datasheet (2021): 312 TFLOPS bf16, 600 GB/s NVLink bidirectional; 108 SMs (Ampere whitepaper).
    # DGX A100: one HDR InfiniBand port of 200 Gb/s per GPU; PCIe 4.0 x16 to the host, 31.5 GB/s.
    # 39.4 and 79.2 GiB: memory shown by nvidia-smi minus what the driver reserves.
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
    # FlashAttention-2 (Dao 2023), figures 4 to 6: 175 to 225 TFLOPs forward and backward, head dim 128, causal.
    attention_efficiency=0.58,
)
_H100 = Device(
    # NVIDIA H100 datasheet (2023): 989.4 TFLOPS bf16 and 1,978.9 FP8, both half of the sparse figure, 3.35 TB/s, 900
    # GB/s NVLink; 132 SMs (Hopper whitepaper).
    # DGX H100: one NDR InfiniBand port of 400 Gb/s per GPU; PCIe 5.0 x16.
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
    fp8_tflops=1978.9,
    matmul_efficiency=0.64,
    # FlashAttention-3 (Shah et al. 2024), figures 5 and 6: cuDNN and FA3 450 to 600 TFLOPs, FA2 about 350.
    attention_efficiency=0.45,
    # FlexAttention of torch 2.11 on one H200, 2048 tokens per sample, from profiled steps (docs/notes/performance.md).
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
        # KempnerForge reports 10,471 tokens/s for Llama-3-8B on one GPU, 4096 tokens per sample, full recomputation.
        replace(_H100, name="h200", memory_gib=139.8, memory_gigabytes_per_s=4800.0, matmul_efficiency=0.77),
        # AMD Instinct MI300X data sheet (2023): 1,307.4 TFLOPS bf16, 192 GB, 5.3 TB/s, 304 compute units, seven
        # Infinity Fabric links of 128 GB/s bidirectional. GEMMs reach about half the peak, attention a third: AMD's
        # ROCm blog, "Measuring Max-Achievable FLOPs" (2025), and its Megatron-LM results.
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
"""Built-in devices by name: SXM or OAM modules, 8 per node."""


def find_device(name: str) -> Device:
    """Returns the built-in device of this name, or reads a file written by `megads calibrate`.

    Raises:
        ConfigError: the name is unknown, or the file does not describe a device.
    """
    if name.endswith((".yaml", ".yml", ".json")):
        return read_device(Path(name))
    if name not in DEVICES:
        raise ConfigError(
            f"device = {name}: must be auto, cpu, cuda, one of {', '.join(DEVICES)}, or a file "
            "written by megads calibrate (.yaml)"
        )
    return DEVICES[name]


def built_in_device_of(gpu: str) -> str | None:
    """The key in `DEVICES` of a GPU.

    Args:
        gpu: the driver's name of the GPU, for example "NVIDIA H100 80GB HBM3".

    Returns:
        None if the GPU is not in `DEVICES`, such as a PCIe card, whose links differ, or a MIG slice.
    """
    words = set(gpu.lower().replace("-", " ").split())
    if words & {"mig", "pcie", "nvl"}:
        return None
    return next((name for name in DEVICES if words.issuperset(name.split("_"))), None)


def read_device(path: Path) -> Device:
    """Reads a device from YAML: the attributes of `Device`; `like: <name>` provides those that are left out.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid.
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
    """Builds a device from the content of a device file.

    Args:
        found: mapping with the attributes of `Device`, and optionally `like`.
        name: name of the device if `found` has none.

    Raises:
        ConfigError: an attribute is missing, unknown or invalid.
    """
    if not isinstance(found, dict):
        raise ConfigError("must contain the attributes of a device, as written by megads calibrate")
    base: dict[str, Any] = {"name": name}
    if "like" in found:
        base = vars(find_device(str(found["like"]))) | base
    own = {key: value for key, value in found.items() if key != "like"}
    unknown = sorted(str(key) for key in own if key not in _DEFAULTS)
    missing = sorted(_REQUIRED - (base | own).keys())
    if unknown or missing:
        what = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"{what}; megads calibrate writes complete files, like: h100 fills in missing attributes")
    return Device(**(base | {key: _attribute(key, value) for key, value in own.items()}))


_ROWS = {
    "products": "m, n, k and TFLOPs",
    "input_products": "m, n, k and TFLOPs",
    "weight_products": "m, n, k and TFLOPs",
    "attention_rates": "tokens per sample, TFLOPs forward and backward",
    "alibi_attention_rates": "tokens per sample, TFLOPs forward and backward",
    "repeatable_attention_rates": "head dim, TFLOPs forward and backward",
    "collectives": "name, bytes per element, latency in microseconds and GB/s",
    "layout_costs": "layout, microseconds per block and nanoseconds per element",
}
"""Attributes that are lists of rows, and the columns of a row."""
_NAMED_ROWS = {"collectives": MeasuredCollective, "layout_costs": LayoutCosts}
"""Attributes whose rows start with a name."""
_MAY_BE_ZERO = ("step_us", "hidden_cost", "forward_launch_us", "backward_launch_us")
_COSTS = tuple(field.name for field in fields(PassCosts))
_DEFAULTS = {field.name: field.default for field in fields(Device)}
_REQUIRED = {name for name, default in _DEFAULTS.items() if default is MISSING and name != "name"}


def _attribute(key: str, value: Any) -> Any:
    """Converts a YAML value to the type that `Device` expects.

    Raises:
        ConfigError: the value is invalid.
    """
    if value is None and _DEFAULTS[key] is None:
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
    """Returns a positive number (or zero, if `zero`); raises ConfigError for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{key} = {value}: must be a number {'of at least 0' if zero else 'above 0'}")
    return value


def _rows(key: str, value: Any) -> tuple[Any, ...]:
    """Converts a list of rows of measurements; raises ConfigError for invalid rows."""
    columns = _ROWS[key].replace(" and ", ", ").split(", ")
    if not isinstance(value, list) or any(not isinstance(row, list) or len(row) != len(columns) for row in value):
        raise ConfigError(f"{key} = {value}: must be a list of rows of {_ROWS[key]}")
    for row in value:
        for column in row[1:] if key in _NAMED_ROWS else row:
            _number(f"{key}, {row}", column, zero=key == "layout_costs")
    if key in _NAMED_ROWS:
        return tuple(_NAMED_ROWS[key](str(name), *rest) for name, *rest in value)
    return tuple(tuple(row) for row in value)
