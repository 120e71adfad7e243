"""Incremental inference with a KV cache.

Shape suffixes: b = batch, s = position in the new piece, t = key position, n = heads, m = heads of keys and values,
d = head dim, h = hidden size, v = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.attention import Attention, AttentionCore, causal_bias_at, mask_other_documents
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.ops.attention import bias_dtype

PIECE = 512
"""Maximum tokens per forward pass, so that the mask of a long prompt is not quadratic in its length."""


class DecodeStep:
    """State of one forward pass that all layers share.

    Args:
        places_bs: position of every new token in its sequence.
        first_query: lowest position of a query of this pass or a later one.
        end: end of the positions of all keys, exclusive.
        starts_bs: position at which the document of every new token starts; None: every row is one document.
    """

    def __init__(self, places_bs: Tensor, first_query: int, end: int, starts_bs: Tensor | None) -> None:
        self.places_bs = places_bs
        self.first_query, self.end = first_query, end
        self.starts_bs = starts_bs
        self._biases: dict[tuple[bool, int | None], Tensor] = {}

    def keys(self, core: AttentionCore) -> range:
        """Positions of all keys that any query of this pass or a later one may attend to."""
        return range(0 if core.window is None else max(0, self.first_query - core.window + 1), self.end)

    def bias(self, core: AttentionCore, dtype: torch.dtype) -> Tensor:
        """Additive mask [b, n or 1, s, t] over `keys`, computed once for all layers of a kind: they hold the same
        heads."""
        kind = (core.alibi, core.window)
        if kind not in self._biases:
            keys = self.keys(core)
            keys_t = torch.arange(keys.start, keys.stop, device=self.places_bs.device)
            heads = (core.num_heads, core.heads)
            bias = causal_bias_at(*heads, self.places_bs, keys_t, core.alibi, dtype, core.window)
            if self.starts_bs is not None:
                bias = mask_other_documents(bias, self.starts_bs - keys.start)
            self._biases[kind] = bias
        return self._biases[kind]


class CachedAttentionCore(nn.Module):
    """Replaces an AttentionCore by one with a KV cache of all tokens so far.

    Slot i of a row holds key and value of the token at position first + i. Rows shorter than others have padding in the
    slots beyond their length. The causal mask hides it, since no query of the row is at these positions, until real
    tokens overwrite it. Rows of different lengths therefore need no further mask, and each computes the same as alone.
    Slots outside the window of all rows are dropped when the cache is reallocated.
    """

    def __init__(self, core: AttentionCore) -> None:
        super().__init__()
        self.core = core
        self.current: DecodeStep | None = None
        self.first = 0
        self.keys_btmd: Tensor | None = None
        self.values_btmd: Tensor | None = None

    def clear(self) -> None:
        """Empties the cache."""
        self.first, self.keys_btmd, self.values_btmd = 0, None, None

    def select_rows(self, rows: Tensor) -> None:
        """Keeps only these rows of the cache."""
        if self.keys_btmd is not None and self.values_btmd is not None:
            self.keys_btmd, self.values_btmd = self.keys_btmd[rows], self.values_btmd[rows]

    def forward(
        self, q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, info: BatchInfo, sinks_n: Tensor | None = None
    ) -> Tensor:
        """Returns [b, n, s, d]; see AttentionCore."""
        current = self.current
        assert current is not None
        keys = current.keys(self.core)
        self._make_room(keys, k_bmsd)
        assert self.keys_btmd is not None and self.values_btmd is not None
        rows = torch.arange(len(k_bmsd), device=k_bmsd.device)[:, None]
        slots_bs = current.places_bs - self.first
        self.keys_btmd[rows, slots_bs] = k_bmsd.transpose(1, 2)
        self.values_btmd[rows, slots_bs] = v_bmsd.transpose(1, 2)
        seen = slice(keys.start - self.first, keys.stop - self.first)
        return self.core.with_bias(
            q_bnsd,
            self.keys_btmd[:, seen].transpose(1, 2),
            self.values_btmd[:, seen].transpose(1, 2),
            current.bias(self.core, bias_dtype(q_bnsd)),
            sinks_n,
        )

    def _make_room(self, keys: range, like_bmsd: Tensor) -> None:
        """Ensures slots for all of `keys`; a reallocation at least doubles the number of slots still in use."""
        batch, heads, _, dim = like_bmsd.shape
        capacity = 0 if self.keys_btmd is None else self.keys_btmd.shape[1]
        if keys.stop - self.first <= capacity:
            return
        seen = slice(keys.start - self.first, capacity)
        held = max(0, capacity - seen.start)
        # Zeros: a masked slot has probability zero, and zero times an uninitialized NaN would be NaN.
        larger = like_bmsd.new_zeros(2, batch, max(len(keys), 2 * held), heads, dim)
        if self.keys_btmd is not None and self.values_btmd is not None:
            larger[0, :, :held] = self.keys_btmd[:, seen]
            larger[1, :, :held] = self.values_btmd[:, seen]
        self.keys_btmd, self.values_btmd = larger.unbind()
        self.first = keys.start


def _frequencies_change(config: ModelConfig, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether rotary frequencies of a row depend on its length such that its cached keys are of other ones.

    Args:
        config: the model.
        before: tokens of each row that the cache holds.
        after: tokens of each row from now on.
    """
    return any(
        kind.rope_scaling.effective_length(old) != kind.rope_scaling.effective_length(new)
        for kind in config.length_dependent_layers()
        for old, new in zip(before, after, strict=True)
        if old
    )


class CachedGPT:
    """Reads sequences incrementally with a KV cache and returns next-token logits.

    Logits equal those of the model on the whole sequence, up to rounding. ALiBi and rotary positions have no maximum
    length; learned positions are limited to model.max_seq_len, which the caller must respect. If a row becomes so long
    that its rotary frequencies change (rope_scaling.kind = longrope: once; dynamic: with every token), all rows are
    read again.

    Args:
        model: the model; it is put in evaluation mode and its attention cores are replaced.
        reset_positions: restart positions with every document, as data.reset_positions does in training.
    """

    def __init__(self, model: GPT, reset_positions: bool = False) -> None:
        self.model = model.eval()
        self.reset_positions = reset_positions
        learned = model.config.position is Position.learned
        self.max_length = model.config.max_seq_len if learned else None
        self.device = next(model.parameters()).device
        self.lengths: list[int] = []
        self._read: list[tuple[list[int], list[int]]] = []  # tokens and document starts of every row
        self._cores: list[CachedAttentionCore] = []
        for attention in [module for module in model.modules() if isinstance(module, Attention)]:
            assert isinstance(attention.core, AttentionCore)
            caching = CachedAttentionCore(attention.core)
            attention.core = caching
            self._cores.append(caching)

    def start(self, num_rows: int) -> None:
        """Empties the cache and starts `num_rows` empty sequences."""
        self.lengths, self._read = [0] * num_rows, [([], []) for _ in range(num_rows)]
        for core in self._cores:
            core.clear()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows only, in this order."""
        self.lengths, self._read = [self.lengths[row] for row in rows], [self._read[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        for core in self._cores:
            core.select_rows(index)

    @torch.no_grad()
    def append(self, pieces: Sequence[Sequence[int]], document_starts: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Reads the next tokens of every row.

        Args:
            pieces: new tokens of every row, at least one each; rows may have different numbers.
            document_starts: for every token, the position in its row at which its document starts; attention does not
                cross it. None: every row is one document.

        Returns:
            Next-token logits of each row, [b, v].
        """
        assert len(pieces) == len(self.lengths) and all(pieces)
        lengths = [length + len(piece) for length, piece in zip(self.lengths, pieces, strict=True)]
        assert self.max_length is None or max(lengths) <= self.max_length
        for (tokens, starts), piece, own in zip(self._read, pieces, document_starts or [()] * len(pieces), strict=True):
            tokens.extend(piece)
            starts.extend(own)
        if _frequencies_change(self.model.config, self.lengths, lengths):
            pieces = [tokens for tokens, _ in self._read]
            document_starts = None if document_starts is None else [starts for _, starts in self._read]
            self.lengths = [0] * len(pieces)
            for core in self._cores:
                core.clear()
        counts_b = torch.tensor([len(piece) for piece in pieces], device=self.device)
        tokens_bs = _padded(pieces, self.device)
        starts_bs = None if document_starts is None else _padded(document_starts, self.device)
        longest = tokens_bs.shape[1]
        rows = torch.arange(len(pieces), device=self.device)
        last_bh: Tensor | None = None
        for start in range(0, longest, PIECE):
            now = slice(start, start + PIECE)
            known_starts_bs = None if starts_bs is None else starts_bs[:, now]
            hidden_bsh, info = self._hidden(tokens_bs[:, now], start, lengths, known_starts_bs)
            # If a row ended before this piece, its last hidden state is already known.
            index_b = counts_b - 1 - start
            here_bh = hidden_bsh[rows, index_b.clamp(0, hidden_bsh.shape[1] - 1)]
            last_bh = here_bh if last_bh is None else torch.where(index_b[:, None] >= 0, here_bh, last_bh)
        assert last_bh is not None
        logits_bv: Tensor = self.model.layers[-1](last_bh, info)
        self.lengths = lengths
        return logits_bv

    def _hidden(
        self, tokens_bs: Tensor, offset: int, ends: Sequence[int], starts_bs: Tensor | None
    ) -> tuple[Tensor, BatchInfo]:
        """Hidden states [b, s, h] before the head.

        Args:
            tokens_bs: tokens from position length + offset of each row on, padded beyond the rows' ends.
            offset: number of tokens of this call that precede them.
            ends: length of each row after this call.
            starts_bs: positions at which the tokens' documents start.
        """
        batch, count = tokens_bs.shape
        first_b = torch.tensor(self.lengths, device=self.device) + offset
        places_bs = first_b[:, None] + torch.arange(count, device=self.device)
        # For a row that has ended, the next query is just after its end.
        next_query = min(min(length + offset, end) for length, end in zip(self.lengths, ends, strict=True))
        current = DecodeStep(places_bs, next_query, max(self.lengths) + offset + count, starts_bs)
        for core in self._cores:
            core.current = current
        positions_bs = places_bs - starts_bs if self.reset_positions and starts_bs is not None else places_bs
        # The positions of padding may exceed the table of learned positions.
        known_bs = positions_bs if self.max_length is None else positions_bs.clamp(max=self.max_length - 1)
        row_lengths = tuple(ends) if self.model.config.length_dependent_layers() else None
        info = BatchInfo(torch.arange(batch, device=self.device), known_bs, row_lengths=row_lengths)
        hidden = tokens_bs
        for layer in list(self.model.layers)[:-1]:
            hidden = layer(hidden, info)
        return hidden, info


class RecomputingGPT:
    """Same interface as `CachedGPT`, for blocks without a KV cache: every call runs the whole sequences.

    Args:
        model: the model; it is put in evaluation mode.
        reset_positions: restart positions with every document, as data.reset_positions does in training.
    """

    def __init__(self, model: GPT, reset_positions: bool = False) -> None:
        self.model, self.reset_positions = model.eval(), reset_positions
        self.device = next(model.parameters()).device
        self._rows: list[list[int]] = []
        self._starts: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every row so far."""
        return [len(row) for row in self._rows]

    def start(self, num_rows: int) -> None:
        """Discards all rows and starts `num_rows` empty sequences."""
        self._rows, self._starts = [[] for _ in range(num_rows)], [[] for _ in range(num_rows)]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Continues with these rows only, in this order."""
        self._rows, self._starts = [self._rows[row] for row in rows], [self._starts[row] for row in rows]

    @torch.no_grad()
    def append(self, pieces: Sequence[Sequence[int]], document_starts: Sequence[Sequence[int]] | None = None) -> Tensor:
        """See CachedGPT.append."""
        for row, piece in zip(self._rows, pieces, strict=True):
            row.extend(piece)
        for starts, piece in zip(self._starts, document_starts or (), strict=False):
            starts.extend(piece)
        tokens_bs = _padded(self._rows, self.device)
        places_s = torch.arange(tokens_bs.shape[1], device=self.device)
        starts_bs = None if document_starts is None else _padded(self._starts, self.device)
        positions_bs = places_s - starts_bs if self.reset_positions and starts_bs is not None else None
        row_lengths = tuple(self.lengths) if self.model.config.length_dependent_layers() else None
        samples_b = torch.arange(len(pieces), device=self.device)
        info = BatchInfo(samples_b, positions_bs, starts_bs, row_lengths=row_lengths)
        hidden = tokens_bs
        for layer in list(self.model.layers)[:-1]:
            hidden = layer(hidden, info)
        # Attention is causal, so padding after a shorter row does not affect it.
        ends_b = torch.tensor(self.lengths, device=self.device) - 1
        logits_bv: Tensor = self.model.layers[-1](hidden[torch.arange(len(pieces), device=self.device), ends_b], info)
        return logits_bv


def with_cache(model: GPT) -> CachedGPT | RecomputingGPT:
    """Wraps a model for incremental inference; only built-in blocks support a KV cache."""
    return RecomputingGPT(model) if model.config.block.is_custom else CachedGPT(model)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pads rows of different lengths with zeros to int64 [b, s]."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
