"""`megads import`: reads a model in Hugging Face's format."""  # noqa: N999

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.tools.hugging_face.config import ImportConfig


def run(config: ImportConfig, _invocation: Invocation) -> int:
    """Imports, and says how to go on."""
    from megads.tools.hugging_face.load import import_folder

    found = import_folder(config)
    print(found)
    print(
        f"train it:  megads train --config-dir={found.folder} model={config.name} checkpoint.init_from={found.folder} "
        "data.raw=<text> train.steps=auto"
    )
    print(f"try it:    megads generate run={found.folder} prompt='...'")
    return EXIT_OK


VERB = Verb("import", ImportConfig, run)
