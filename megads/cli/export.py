"""`megads export`: writes a trained model in Hugging Face's format."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.hugging_face.config import ExportConfig


def run(config: ExportConfig, _invocation: Invocation) -> int:
    """Exports, and says what was written."""
    from megads.tools.hugging_face.export import export_checkpoint

    print(export_checkpoint(config))
    return EXIT_OK


VERB = Verb("export", ExportConfig, run)
