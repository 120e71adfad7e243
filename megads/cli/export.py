"""`megads export`: writes a trained model in Hugging Face format, or as a checkpoint that DeepSpeed can load."""

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.convert.export_config import ExportConfig, ExportFormat


def run(config: ExportConfig, _invocation: Invocation) -> int:
    """Exports the model and prints what was written."""
    if config.format is ExportFormat.universal:
        from megads.tools.convert.universal import export_universal

        print(export_universal(config))
        return EXIT_OK
    from megads.tools.convert.export import export_checkpoint

    print(export_checkpoint(config))
    return EXIT_OK


VERB = Verb("export", ExportConfig, run)
