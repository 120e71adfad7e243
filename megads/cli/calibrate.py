"""`megads calibrate`: measures this machine for `megads plan device=<file>`."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.calibrate.config import CalibrateConfig


def run(config: CalibrateConfig, _invocation: Invocation) -> int:
    """Measures, writes the device file and says what it holds."""
    config.check()
    # The tab key imports this module for its schema and must not wait for torch.
    from megads.tools.calibrate.measure import calibrate, write

    found = calibrate(config)
    path = write(config, found)
    links = ""
    if found["collectives"]:
        links = (
            f", sums over ranks {found['node_gigabytes_per_s']:.3g} GB/s and {found['node_latency_us']:.0f} us a step"
        )
    elif "like" in found:
        links = f"; links to other GPUs, which one alone cannot measure, are those of {found['like']}"
    best = max(rate for *_, rate in found["products"])
    rates = {"attention": found["attention_rates"], "with ALiBi": found.get("alibi_attention_rates", [])}
    attention = ", ".join(f"{name} {max(row[1] for row in rows):.3g}" for name, rows in rates.items() if rows)
    print(
        f"{path}: {found['name']}, products up to {best:.3g} TFLOPs a rank, {attention}, copies "
        f"{found['memory_gigabytes_per_s']:.4g} GB/s{links}"
    )
    print(f"megads plan device={path} ...")
    return EXIT_OK


VERB = Verb("calibrate", CalibrateConfig, run)
