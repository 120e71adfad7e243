"""`megads import`: reads a model in Hugging Face format, or a checkpoint of another trainer."""  # noqa: N999

from __future__ import annotations

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK
from megads.runtime.run_dir import TOKENIZER_FILE
from megads.tools.convert.import_config import ImportConfig


def run(config: ImportConfig, _invocation: Invocation) -> int:
    """Imports the model and prints the next commands."""
    from megads.tools.convert.load import import_folder

    found = import_folder(config)
    print(found)
    train = f"megads train --config-dir={found.folder} model={config.name}"
    if found.has_moments:
        path = found.folder / TOKENIZER_FILE
        tokenizer = f"tokenizer.path={path} " if path.is_file() else ""
        print(f"go on:     {train} checkpoint.load={found.folder} data.raw=<text> {tokenizer}train.steps=<more>")
    print(f"train it:  {train} checkpoint.init_from={found.folder} data.raw=<text> train.steps=auto")
    print(f"try it:    megads generate run={found.folder} prompt='...'")
    return EXIT_OK


VERB = Verb("import", ImportConfig, run)
