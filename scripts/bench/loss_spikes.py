"""Error rates of the loss spike detector: false alarms on healthy curves, and detected synthetic spikes.

python scripts/bench/loss_spikes.py [steps=1000000] [threshold=6] [patience_steps=3] [window_steps=128]

Healthy curves follow a power law from 10.8 to 2.2 nats like those of language models, with a steep beginning, a
learning-rate warmup and a batch-size ramp, under which the noise shrinks. The noise is normal, Student's t with 3
degrees of freedom, or autocorrelated (0.9 from step to step), each with 0.5 to 5% of the loss. Spikes are added to
curves of the same kinds: the loss rises at once, or over 5 steps, by a fraction of itself for 30 steps.
"""

from __future__ import annotations

import sys

import numpy as np

from megads.resilience.config import SpikeConfig
from megads.resilience.spikes import SpikeDetector, StepLoss

NOISES = ("normal", "t3", "autocorrelated")
SHARES = (0.005, 0.01, 0.02, 0.05)
RISES = (0.05, 0.1, 0.2, 0.5, 1.0)
CURVE_STEPS = 20_000
PLANTS = 40
PLANTED_STEPS = 30


def noise(kind: str, steps: int, draw: np.random.Generator) -> np.ndarray:
    """Noise with standard deviation 1."""
    if kind == "normal":
        return draw.standard_normal(steps)
    if kind == "t3":
        return draw.standard_t(3, steps) / np.sqrt(3.0)
    drift = draw.standard_normal(steps)
    for at in range(1, steps):
        drift[at] = 0.9 * drift[at - 1] + np.sqrt(1 - 0.81) * drift[at]
    return drift


def curve(kind: str, share: float, steps: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Loss and gradient norm of a healthy run."""
    at = np.arange(1, steps + 1)
    level = 2.0 + 8.8 * (1 + at / 60) ** -0.55
    ramp = np.sqrt(2048 / np.minimum(2048, 192 + 16 * (at // 80)))
    losses = level * (1 + share * ramp / ramp.mean() * noise(kind, steps, draw))
    norms = (0.3 + 3 * np.exp(-at / 300)) * np.exp(0.25 * noise(kind, steps, draw))
    return losses, norms


def alarms(config: SpikeConfig, losses: np.ndarray, norms: np.ndarray) -> list[int]:
    """Indices at which a spike is detected."""
    detector = SpikeDetector(config)
    pairs = zip(losses.tolist(), norms.tolist(), strict=True)
    return [at for at, (loss, norm) in enumerate(pairs) if detector.observe(StepLoss(at + 1, at + 1, loss, norm))]


def main(arguments: list[str]) -> None:
    """Prints both tables."""
    asked = dict(item.split("=") for item in arguments)
    total = int(asked.pop("steps", 1_000_000))
    config = SpikeConfig(**{name: type(getattr(SpikeConfig(), name))(value) for name, value in asked.items()})
    draw, curves = np.random.default_rng(0), -(-total // (CURVE_STEPS * len(NOISES) * len(SHARES)))
    print(f"{config}\nfalse alarms, in {curves * CURVE_STEPS:,} steps each")
    print(f"{'noise':16}" + "".join(f"{share:>8.1%}" for share in SHARES))
    found = 0
    for kind in NOISES:
        counts = [
            sum(len(alarms(config, *curve(kind, share, CURVE_STEPS, draw))) for _ in range(curves)) for share in SHARES
        ]
        found += sum(counts)
        print(f"{kind:16}" + "".join(f"{count:>8}" for count in counts))
    print(f"{found} in {curves * CURVE_STEPS * len(NOISES) * len(SHARES):,} steps")
    print(f"synthetic spikes detected within {PLANTED_STEPS} steps, of {PLANTS} each, and median steps to detection")
    print(f"{'noise':16}{'':>8}" + "".join(f"{rise:>12.0%}" for rise in RISES))
    for kind in NOISES:
        for share in SHARES:
            cells = [planted(config, kind, share, rise, draw) for rise in RISES]
            print(f"{kind:16}{share:>8.1%}" + "".join(f"{cell:>12}" for cell in cells))


def planted(config: SpikeConfig, kind: str, share: float, rise: float, draw: np.random.Generator) -> str:
    """Number of detected spikes of a size, and the steps to their detection."""
    after = []
    for number in range(PLANTS):
        losses, norms = curve(kind, share, 500, draw)
        first = 250 + int(draw.integers(0, 200))
        growth = np.minimum(1.0, np.arange(1, PLANTED_STEPS + 1) / (5 if number % 2 else 1))
        losses[first : first + PLANTED_STEPS] *= 1 + rise * growth
        hits = [at - first for at in alarms(config, losses, norms) if first <= at < first + PLANTED_STEPS]
        after += hits[:1]
    return f"{len(after)}" + (f" ({int(np.median(after)) + 1})" if after else "")


if __name__ == "__main__":
    main(sys.argv[1:])
