"""`megads checkpoint`: lists, verifies, averages, reshards, uploads and downloads the checkpoints of a run."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.runtime.url import is_url
from megads.tools.checkpoints.config import CheckpointAction, CheckpointActionConfig


def run(config: CheckpointActionConfig, _invocation: Invocation) -> int:
    """Runs the action and prints its result."""
    config.check()
    from megads.tools.checkpoints.command import average, list_all, reshard, verify
    from megads.tools.remote.commands import download, list_remote, upload, verify_remote

    remote = is_url(config.run)
    match config.action:
        case CheckpointAction.list:
            (list_remote if remote else list_all)(config.run)
        case CheckpointAction.verify:
            return (verify_remote if remote else verify)(config.run, config.wanted_steps)
        case CheckpointAction.upload:
            print(upload(config.run, config.output))
        case CheckpointAction.download:
            print(download(config))
        case CheckpointAction.average:
            print(average(config))
        case CheckpointAction.reshard:
            print(reshard(config))
    return EXIT_OK


VERB = Verb(
    "checkpoint",
    CheckpointActionConfig,
    run,
    flags={action.value: f"action={action.name}" for action in CheckpointAction},
)
