"""Options of `megads import`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.api import ConfigError


class ImportFormat(StrEnum):
    """Format of the checkpoint; auto detects it from the names of the files."""

    auto = "auto"
    hugging_face = "hugging_face"
    megatron_deepspeed = "megatron_deepspeed"
    gpt_neox = "gpt_neox"
    megatron_core = "megatron_core"
    nanotron = "nanotron"
    universal = "universal"


@dataclass
class ImportConfig:
    """Options of `megads import`."""

    input: str = "???"
    """Folder of the checkpoint, or a folder of several with a file such as `latest`, whose newest one is imported."""
    output: str = "???"
    """Folder to create: a run without training, usable with checkpoint.init_from, generate and export."""
    format: ImportFormat = ImportFormat.auto
    """hugging_face, megatron_deepspeed (BigScience's fork and Microsoft's), gpt_neox, megatron_core (Megatron-LM's
    torch_dist), nanotron (Llama), universal (DeepSpeed's), or auto: detected from the files."""
    tokenizer: str | None = None
    """tokenizer.json that the model was trained with. null uses the one in the folder; if there is none, the tokenizer
    is not compared with the data's."""
    vocab_size: int | None = None
    """Number of leading embedding rows to keep; other trainers pad the embedding for tensor parallelism. null: the
    number of the tokenizer's tokens; without a tokenizer, the checkpoint's vocabulary size before padding, or else all
    rows. For Hugging Face folders null keeps all rows."""
    optimizer: bool = True
    """Also import the optimizer state and the step if the checkpoint has them, so that checkpoint.load=<output>
    resumes. The weights are then the optimizer's fp32 master weights."""
    name: str = "imported"
    """Name of the model preset that is written, for model=<name> with --config-dir=<output>."""
    overwrite: bool = False
    """Replace an earlier import in the output folder."""

    def check(self) -> None:
        """Raises ConfigError if name is not an identifier or vocab_size is below 1."""
        if not self.name.isidentifier():
            raise ConfigError(f"name = {self.name}: want letters, digits and underscores, as in my_llama")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size = {self.vocab_size}: must be at least 1")
