"""The vocabulary in which a model says how it may be cut. Pure data: no process group, no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Cut(StrEnum):
    """How tensor parallelism cuts a module's parameters.

    column: output features (dim 0 of weight and bias); the module enters a parallel region.
    row: input features (dim 1 of the weight, bias whole); the module leaves the region with a sum over ranks.
    columns: nothing; the module is called with a tensor and the column modules that read it, and enters their region
        once for all of them.
    rows: nothing; the module is called with tensors and the row modules that read them, and leaves their region once,
        with the sum of all.
    vocab: rows of an embedding table; the lookup ends with a sum over ranks.
    vocab_head: rows of the output projection; the module enters a region that ends in the loss.
    sequence: nothing; the module looks up whole positions [..., s], and with sequence parallelism a rank looks up only
        those of its share of the sequence.

    With sequence parallelism entering a region gathers the sequence, leaving one scatters it.
    """

    column = "column"
    row = "row"
    columns = "columns"
    rows = "rows"
    vocab = "vocab"
    vocab_head = "vocab_head"
    sequence = "sequence"


@dataclass(frozen=True)
class ShardingTable:
    """What tensor parallelism must know of a model; keys are patterns of full module paths, first match wins.

    Attributes:
        parameters: pattern -> cut. What is not named is replicated. A column module opens the activation
            region that the next row module of the same branch closes; a vocab_head opens the one the loss closes.
            Modules of columns and rows do both for several branches together.
        dropouts: patterns of modules outside of the regions whose masks follow from the tokens' places. With sequence
            parallelism a rank's tokens are a share of dim 1, which `shard`, (rank, size), tells them.
        attention_cores: patterns of modules whose `narrow(rank, size)` keeps a contiguous share of the heads, and which
            take queries of some tokens with keys and values of all.
    """

    parameters: Mapping[str, Cut]
    dropouts: tuple[str, ...] = ()
    attention_cores: tuple[str, ...] = ()
