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
    collectives = ""
    if found["collectives"]:
        collectives = (
            f", sums over ranks {found['node_gigabytes_per_s']:.3g} GB/s and {found['node_latency_us']:.0f} us a step"
        )
    print(
        f"{path}: {found['name']}, products up to {found['peak_tflops']:.3g} TFLOPs a rank, copies "
        f"{found['memory_gigabytes_per_s']:.3g} GB/s{collectives}"
    )
    print(f"megads plan device={path} ...")
    return EXIT_OK


VERB = Verb("calibrate", CalibrateConfig, run)
