"""Time of the copies of offloaded activations to host memory and back, against the blocks that hide them.

The copies of a block run while the next block computes, in the forward and in the backward pass. What takes longer than
that is exposed. Both directions have the full bandwidth of the device's link to the host
(`Device.host_gigabytes_per_s`); devices that share a link, or a host whose memory is slower, are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megads.api import EMBEDDING, gib
from megads.model.config import is_block
from megads.tools.plan.activations import stage_ops
from megads.tools.plan.devices import Device
from megads.tools.plan.memory_timeline import host_bytes
from megads.tools.plan.micro_batch import BatchSizes
from megads.tools.plan.operators import LayerSeconds, total
from megads.tools.plan.workload import StageLayers


@dataclass(frozen=True)
class BlockCopy:
    """Copies of one block's activations, for one micro-batch on a rank.

    Attributes:
        size: bytes that leave the device, and come back.
        seconds: time of a copy in one direction.
        forward: time of the block that runs meanwhile in the forward pass, in seconds.
        backward: the same in the backward pass.
    """

    size: int
    seconds: float
    forward: float
    backward: float

    @property
    def exposed(self) -> tuple[float, float]:
        """Seconds by which the compute stream waits in the forward and in the backward pass."""
        return max(0.0, self.seconds - self.forward), max(0.0, self.seconds - self.backward)

    @property
    def is_hidden(self) -> bool:
        """Whether both passes take longer than the copies."""
        return not any(self.exposed)


def copies_of_stage(
    sizes: BatchSizes,
    layers: StageLayers,
    leaving: frozenset[str],
    device: Device,
    blocks: Sequence[LayerSeconds],
) -> list[BlockCopy]:
    """The copies of the blocks of a virtual stage that are offloaded.

    Args:
        sizes: the micro-batch.
        layers: layers of the stage.
        leaving: names of the blocks that are offloaded.
        device: device of the rank.
        blocks: time of every block of the stage, in their order.
    """
    found, names = list[BlockCopy](), [name for name in layers if is_block(name)]
    for index, name in enumerate(names):
        if name not in leaving:
            continue
        # The first block of a later stage does not move its input; the embedding's name stands for what comes before.
        alone = {name: layers[name]} | ({} if index == 0 and EMBEDDING not in layers else {EMBEDDING: layers[name]})
        size = host_bytes(stage_ops(sizes, alone, first=True, last=True, leaving=leaving))
        beside = blocks[min(index + 1, len(blocks) - 1)]
        backward = total(beside.backward_input) + total(beside.backward_weight)
        seconds = size / (device.host_gigabytes_per_s * 1e9)
        found.append(BlockCopy(size, seconds, total(beside.forward), backward))
    return found


def exposed(copies: Sequence[BlockCopy]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Exposed seconds of a stage's forward and backward pass, as parts of a step."""
    if not copies:
        return {}, {}
    forward, backward = zip(*(copy.exposed for copy in copies), strict=True)
    return {"offload": sum(forward)}, {"offload": sum(backward)}


def copies_line(copies: Sequence[BlockCopy], device: Device) -> str:
    """One line that says whether the copies are hidden; empty if nothing is offloaded."""
    if not copies:
        return ""
    worst = max(copies, key=lambda copy: copy.seconds - min(copy.forward, copy.backward))
    passes = f"forward {1e3 * worst.forward:,.2f} ms, backward {1e3 * worst.backward:,.2f} ms"
    verdict = "hidden by the next block"
    if not worst.is_hidden:
        ahead, back = (1e3 * sum(copy.exposed[way] for copy in copies) for way in (0, 1))
        verdict = (
            f"longer than the next block: the device waits {ahead:,.2f} ms in the forward and {back:,.2f} ms in the "
            "backward pass of a micro-batch"
        )
    return (
        f"offloading moves {gib(worst.size)} of a block to the host and back, {1e3 * worst.seconds:,.2f} ms each way "
        f"at {device.host_gigabytes_per_s:g} GB/s, beside a block ({passes}): {verdict}"
    )


def copies_json(copies: Sequence[BlockCopy]) -> dict[str, Any]:
    """The same as JSON-serializable values, for a micro-batch of the busiest rank; sizes in bytes, times in seconds."""
    ahead, back = (sum(copy.exposed[way] for copy in copies) for way in (0, 1))
    return {
        "moved_bytes": sum(copy.size for copy in copies),
        "copy_s": sum(copy.seconds for copy in copies),
        "exposed_forward_s": ahead,
        "exposed_backward_s": back,
        "hidden": all(copy.is_hidden for copy in copies),
    }
