"""`megads verify_layout`: checks that a layout trains the same model as one process."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.config.frozen import derive_run_id
from megads.config.root import check_shape
from megads.errors import EXIT_OK, NumericalError
from megads.tools.verify.config import VerifyLayoutConfig


def run(config: VerifyLayoutConfig, invocation: Invocation) -> int:
    """Trains a small copy of the model in the layout and on one process, and compares them."""
    config.verify.check()
    config.cluster.check()
    check_shape(config)
    config.optim.check()
    name = config.run.name or invocation.choices.get("experiment") or invocation.choices.get("model") or "run"
    folder = config.verify.dir or f"runs/verify/{derive_run_id(config, name.replace('/', '-'))}"
    # Shell completion imports this module, so torch is imported late.
    from megads.tools.verify.compare import verify

    code, failed = verify(config, folder)
    if code == EXIT_OK and failed:
        raise NumericalError(f"this layout does not train the same model: {failed} checks failed; see {folder}")
    return code


VERB = Verb("verify_layout", VerifyLayoutConfig, run, flags={"--json": "json=true"})
