"""`megads calibrate`: measures this machine for `megads plan device=<file>`."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.plan.calibrate.config import CalibrateConfig


def run(config: CalibrateConfig, _invocation: Invocation) -> int:
    """Measures this machine, writes the device file and prints a summary."""
    config.check()
    # Shell completion imports this module, so torch is imported late.
    from megads.tools.plan.calibrate.measure import calibrate, write

    found = calibrate(config)
    path = write(config, found)
    links = ""
    if found["collectives"]:
        links = f", all-reduce {found['node_gigabytes_per_s']:.3g} GB/s and {found['node_latency_us']:.0f} us per step"
    elif "like" in found:
        links = f"; links between GPUs cannot be measured with one GPU: those of {found['like']} are used"
    best = max(rate for *_, rate in found["products"])
    rates = {"attention": found["attention_rates"], "with ALiBi": found.get("alibi_attention_rates", [])}
    attention = ", ".join(f"{name} {max(row[1] for row in rows):.3g}" for name, rows in rates.items() if rows)
    print(
        f"{path}: {found['name']}, GEMMs up to {best:.3g} TFLOPs per rank, {attention}, copies "
        f"{found['memory_gigabytes_per_s']:.4g} GB/s{links}"
    )
    print(f"megads plan device={path} ...")
    return EXIT_OK


VERB = Verb("calibrate", CalibrateConfig, run)
