"""What `megads import` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class ImportFormat(StrEnum):
    """Who wrote the checkpoint; auto goes by the names of the files."""

    auto = "auto"
    hugging_face = "hugging_face"
    megatron_deepspeed = "megatron_deepspeed"
    gpt_neox = "gpt_neox"
    megatron_core = "megatron_core"
    nanotron = "nanotron"
    universal = "universal"


@dataclass
class ImportConfig:
    """Everything `megads import` can be told."""

    input: str = "???"
    """Folder of the checkpoint; one that holds several, with `latest` or its like, means the newest."""
    output: str = "???"
    """Folder to make: a run without training, which checkpoint.init_from, generate and export take."""
    format: ImportFormat = ImportFormat.auto
    """hugging_face, megatron_deepspeed (BigScience's fork and Microsoft's), gpt_neox, megatron_core (Megatron-LM's
    torch_dist), nanotron (Llama), universal (DeepSpeed's), or auto: told by the files."""
    tokenizer: str | None = None
    """tokenizer.json that the model was trained with; null is the one in the folder, or none: nobody then compares it
    with that of the data."""
    vocab_size: int | None = None
    """Rows of the embedding to keep, from the first: others pad it for tensor parallelism. null: as many as the
    tokenizer has tokens; without one as many as the checkpoint says it had before padding, else all. All of a Hugging
    Face folder."""
    optimizer: bool = True
    """Take the optimizer's state and the step too, where they are there: checkpoint.load=<output> goes on. Then weights
    are those of the optimizer, in fp32."""
    name: str = "imported"
    """Name of the preset that is written, for model=<name> with --config-dir=<output>."""
    overwrite: bool = False
    """Replace an earlier import in that folder."""

    def check(self) -> None:
        """Raises ConfigError on a name that is no file's, and on no rows."""
        if not self.name.isidentifier():
            raise ConfigError(f"name = {self.name}: want letters, digits and underscores, as in my_llama")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size = {self.vocab_size}: must be at least 1")
