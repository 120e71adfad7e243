"""The model's layers (embedding, blocks, final norm, head), their initial weights, and the unsharded model.

A layer, the unit of pipeline partitioning, is a plain module called as `layer(hidden, info) -> hidden`. The
embedding takes tokens, the head returns logits. `GPT` runs all layers unsharded and is the reference for every layout.

Initial weights are a pure function of seed and parameter name, and therefore bitwise the same in every layout. Each
full tensor is drawn and sliced afterwards, so at most one full matrix is in memory at a time and ranks need no
communication. Blocks of a tensor have their own random generators, so that a rank's threads draw them at once.

Shape suffixes: b = batch, s = sequence, h = hidden size, v = vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.attention import Attention, AttentionCore
from megads.model.config import (
    CUSTOM,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TIED_COPY,
    TIED_PARAMETER,
    ModelConfig,
    NormPlacement,
    Position,
    layer_costs,
)
from megads.model.layers import Dropout, Norm
from megads.model.mlp import MLP
from megads.model.moe import EXPERT_BIAS, EXPERT_LOAD, Experts, MoE
from megads.model.sharding import SHARDING, sharding_of
from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.linear import linear
from megads.ops.softcap import softcap
from megads.parallel.grouped_linear import GroupedLinear
from megads.parallel.partition import ShardingTable
from megads.runtime.registry import BLOCKS

DRAWN_BY_ONE = 1 << 22
"""Elements of a parameter that one random generator draws, in about 40 ms."""

InitialValue = Callable[[str, tuple[int, ...]], Tensor]
"""(parameter name, unsharded shape) -> fp32 tensor on the CPU."""


class Embedding(nn.Module):
    """Word embedding, then optional scaling, learned positions and BLOOM's embedding norm, then dropout."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.word = _table(config.vocabulary, config.hidden_size)
        self.scale = config.embedding_multiplier * (math.sqrt(config.hidden_size) if config.scale_embedding else 1.0)
        learned = config.position is Position.learned
        self.position = _table(config.max_seq_len, config.hidden_size) if learned else None
        self.norm = Norm(config) if config.embedding_norm else None
        self.dropout = Dropout(config.hidden_dropout, seed, "embedding.dropout")

    def forward(self, tokens_bs: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        hidden_bsh: Tensor = self.word(tokens_bs)
        if self.scale != 1.0:
            hidden_bsh = hidden_bsh * self.scale
        if self.position is not None:
            hidden_bsh = hidden_bsh + self.position(info.positions(tokens_bs.shape[1], tokens_bs.device))
        if self.norm is not None:
            hidden_bsh = self.norm(hidden_bsh)
        dropped_bsh: Tensor = self.dropout(hidden_bsh, info)
        return dropped_bsh


def _table(rows: int, width: int) -> nn.Embedding:
    """An nn.Embedding without random initialization, which on the meta device would import torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _branch(config: ModelConfig) -> MLP | MoE:
    """The MLP or the experts of a layer."""
    return MoE(config) if config.moe.enabled else MLP(config)


def _output_of(branch: nn.Module, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
    out_bsh: Tensor = branch(hidden_bsh, info) if isinstance(branch, MoE) else branch(hidden_bsh)
    return out_bsh


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)) with a second norm."""

    def __init__(self, config: ModelConfig, seed: int, index: int) -> None:
        super().__init__()
        site, self.multiplier = f"blocks.{index}", config.residual_multiplier
        self.input_norm = Norm(config)
        self.attention = Attention(config, seed, f"{site}.attention")
        self.attention_dropout = Dropout(config.hidden_dropout, seed, f"{site}.attention_dropout")
        self.post_attention_norm = Norm(config)
        self.mlp = _branch(config)
        self.mlp_dropout = Dropout(config.hidden_dropout, seed, f"{site}.mlp_dropout")

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        attended_bsh = _times(self.attention(self.input_norm(hidden_bsh), info), self.multiplier)
        normed_bsh, hidden_bsh = self.post_attention_norm.add_and_norm(
            self.attention_dropout(attended_bsh, info), hidden_bsh
        )
        return self.mlp_dropout.add(_times(_output_of(self.mlp, normed_bsh, info), self.multiplier), hidden_bsh, info)


class OutputNormBlock(nn.Module):
    """x + norm(attention(x)), then x + norm(mlp(x)): the norm placement of Swin v2 (Liu et al. 2022) and OLMo 2.

    With NormPlacement.both the inputs are normalized, too, as in Gemma 2: x + norm(attention(norm(x))).
    """

    def __init__(self, config: ModelConfig, seed: int, index: int) -> None:
        super().__init__()
        site, self.multiplier = f"blocks.{index}", config.residual_multiplier
        both = config.norm_placement is NormPlacement.both
        self.input_norm = Norm(config) if both else None
        self.attention = Attention(config, seed, f"{site}.attention")
        self.attention_output_norm = Norm(config)
        self.attention_dropout = Dropout(config.hidden_dropout, seed, f"{site}.attention_dropout")
        self.post_attention_norm = Norm(config) if both else None
        self.mlp = _branch(config)
        self.mlp_output_norm = Norm(config)
        self.mlp_dropout = Dropout(config.hidden_dropout, seed, f"{site}.mlp_dropout")

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        inner_bsh = hidden_bsh if self.input_norm is None else self.input_norm(hidden_bsh)
        inner_bsh = _times(self.attention_output_norm(self.attention(inner_bsh, info)), self.multiplier)
        if self.post_attention_norm is None:
            hidden_bsh = inner_bsh = self.attention_dropout.add(inner_bsh, hidden_bsh, info)
        else:
            dropped_bsh = self.attention_dropout(inner_bsh, info)
            inner_bsh, hidden_bsh = self.post_attention_norm.add_and_norm(dropped_bsh, hidden_bsh)
        mlp_bsh = _times(self.mlp_output_norm(_output_of(self.mlp, inner_bsh, info)), self.multiplier)
        return self.mlp_dropout.add(mlp_bsh, hidden_bsh, info)


class SharedInput(nn.Module):
    """Applies several linears, passed as arguments, to one input; replaced by sharding, see `ParallelStyle.columns`."""

    def forward(self, hidden_bsh: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """Returns each layer's output, [b, s, ...]."""
        return tuple(layer(hidden_bsh) for layer in layers)


class SummedOutput(nn.Module):
    """Sums the outputs of several linear layers with an input each; replaced by sharding, see `ParallelStyle.rows`."""

    def forward(self, inputs: Sequence[Tensor], layers: Sequence[nn.Module]) -> Tensor:
        """Returns [b, s, h].

        Args:
            inputs: input of each layer, [b, s, ...].
            layers: the layers, at least one.
        """
        first_bsh, *others = (layer(x) for layer, x in zip(layers, inputs, strict=True))
        out_bsh: Tensor = sum(others, start=first_bsh)
        return out_bsh


class ParallelBlock(nn.Module):
    """x + dropout(attention(norm(x)) + mlp(norm(x))), as in GPT-J and PaLM (Chowdhery et al. 2022): one norm.

    The first projections of both branches read the same tensor, and the outputs of the last ones are added before the
    dropout (one mask, as in Falcon). The branches thus share the collectives that enter and leave their tensor-parallel
    region (Jiang et al. 2024, MegaScale, section 3.1).

    With two norms, as in GPT-NeoX (Black et al. 2022), attention reads the first and the MLP the second. Both are norms
    of the block's input; the second has GPT-NeoX's name. The branches enter their region separately.
    """

    def __init__(self, config: ModelConfig, seed: int, index: int) -> None:
        super().__init__()
        site, self.multiplier = f"blocks.{index}", config.residual_multiplier
        self.input_norm = Norm(config)
        self.attention = Attention(config, seed, f"{site}.attention")
        self.post_attention_norm = Norm(config) if config.parallel_norms == 2 else None
        self.mlp = MLP(config)
        self.summed_dropout = Dropout(config.hidden_dropout, seed, f"{site}.summed_dropout")
        self.shared_input: nn.Module = SharedInput()
        self.summed_output: nn.Module = SummedOutput()

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        inputs = self._inner(hidden_bsh, info)
        summed_bsh = self.summed_output(inputs, (self.attention.dense, self.mlp.down))
        return self.summed_dropout.add(_times(summed_bsh, self.multiplier), hidden_bsh, info)

    def _inner(self, hidden_bsh: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor]:
        """Inputs of the last projections of attention and MLP."""
        normed_bsh = self.input_norm(hidden_bsh)
        if self.post_attention_norm is None:
            qkv, up_bsf = self.shared_input(normed_bsh, self.attention.qkv, self.mlp.first)
        else:
            qkv, up_bsf = self.attention.qkv(normed_bsh), self.mlp.first(self.post_attention_norm(hidden_bsh))
        heads = self.attention.heads(qkv, info)
        del qkv  # frees it if the heads are copies
        return self.attention.context(*heads, info), self.mlp.activate(up_bsf)


class CustomBlock(nn.Module):
    """Wrapper of a plugin's block."""

    def __init__(self, config: ModelConfig, seed: int, index: int) -> None:
        super().__init__()
        site = f"blocks.{index}.{CUSTOM}"
        self.custom: nn.Module = BLOCKS.make(config.block.name, config.block.options, config, seed, site)

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        out_bsh: Tensor = self.custom(hidden_bsh, info)
        return out_bsh


def make_block(config: ModelConfig, seed: int, index: int) -> Block | OutputNormBlock | ParallelBlock | CustomBlock:
    """Builds the type of block that the model's configuration selects.

    Args:
        config: configuration of the model.
        seed: the run's seed, for dropout.
        index: index of the block in the whole model.

    Raises:
        ConfigError: no plugin registered the configured block.
    """
    config = config.layer(index)
    if config.block.is_custom:
        return CustomBlock(config, seed, index)
    if config.norm_placement is not NormPlacement.input:
        return OutputNormBlock(config, seed, index)
    return (ParallelBlock if config.parallel_block else Block)(config, seed, index)


class FinalNorm(Norm):
    """The norm after the last block, times the multiplier of the logits.

    The head is linear, and its input is smaller than its output, so the input is scaled.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.multiplier = config.logit_multiplier

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:  # type: ignore[override]
        return _times(super().forward(hidden_bsh), self.multiplier)


class Head(nn.Module):
    """Output projection; with tied embeddings it shares the word embedding's weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.vocabulary)) if config.head_bias else None
        self.softcap = config.final_logit_softcap

    def tie(self, embedding: Embedding) -> None:
        """Shares the word embedding's weight."""
        weight = embedding.word.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns logits [b, s, v]."""
        logits_bsv = linear(hidden_bsh, self.weight, self.bias, TORCH)
        return logits_bsv if self.softcap is None else softcap(logits_bsv, self.softcap)


@dataclass(frozen=True)
class ModelLayerSpec:
    """Specification of a layer that has not been built yet.

    Attributes:
        name: prefix of its parameters' names in the whole model, for example "blocks.3".
        cost: relative cost for pipeline partitioning; embedding and head cost as much as a block.
        build: builds the module on torch's current default device.
        table: sharding table of the model.
    """

    name: str
    cost: float
    build: Callable[[], nn.Module]
    table: ShardingTable = SHARDING


def use_kernels(layer: nn.Module, kernels: Kernels = FUSED) -> None:
    """Sets the kernel implementation of all modules of a layer or model.

    Args:
        layer: the layer or model, changed in place.
        kernels: kernels loaded by `megads.ops.resolve.load`.
    """
    for module in layer.modules():
        if isinstance(module, Attention | AttentionCore | Dropout | Experts | GroupedLinear | MLP | Norm):
            module.kernels = kernels


def layer_specs(config: ModelConfig, seed: int) -> list[ModelLayerSpec]:
    """Specifications of the model's layers in order; allocates nothing.

    Args:
        config: configuration of the model.
        seed: the run's seed, for dropout.
    """
    table = sharding_of(config)

    def spec(name: str, cost: float) -> ModelLayerSpec:
        if name == EMBEDDING:
            return ModelLayerSpec(name, cost, lambda: Embedding(config, seed))
        if name == FINAL_NORM:
            return ModelLayerSpec(name, cost, lambda: FinalNorm(config))
        if name == HEAD:
            return ModelLayerSpec(name, cost, lambda: Head(config))
        index = int(name.rpartition(".")[2])
        return ModelLayerSpec(name, cost, lambda: make_block(config, seed, index), table)

    return [spec(name, cost) for name, cost in layer_costs(config).items()]


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Random generator of a parameter, or of a block of it, seeded by the run's seed and its name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(config: ModelConfig, seed: int) -> InitialValue:
    """BLOOM's initialization: matrices N(0, std), output projections of attention and MLP N(0, std / sqrt(2 L)), norm
    gains 1 (zero-centered norm weights 0), biases and sinks 0.

    Args:
        config: configuration of the model; std is `config.hidden_std` for matrices of blocks, else `config.weight_std`.
        seed: the run's seed.
    """
    branch_std = config.hidden_std / math.sqrt(2.0 * config.num_layers)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith((".bias", "attention.sinks.weight", EXPERT_BIAS)):
            return torch.zeros(shape)
        if name.endswith(EXPERT_LOAD):
            return torch.ones(shape)
        if len(shape) == 1:
            return torch.zeros(shape) if config.norm_zero_centered else torch.ones(shape)
        std = config.hidden_std if name.startswith("blocks.") else config.weight_std
        if name.endswith(("attention.dense.weight", "mlp.down.weight", "experts.down.weight", "shared.down.weight")):
            std = branch_std
        return draw_normal(shape, std, seed, name)

    return value


def draw_normal(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    """Draws a parameter from N(0, std), fp32; bitwise the same for any number of threads.

    Args:
        shape: unsharded shape.
        std: standard deviation.
        seed: the run's seed.
        name: name of the parameter.
    """
    full = torch.empty(shape, device="cpu")
    blocks = full.view(-1).split(DRAWN_BY_ONE)

    def draw(number: int) -> None:
        key = f"{name}/{number}" if number else name
        blocks[number].normal_(0.0, std, generator=parameter_generator(seed, key))

    # PyTorch draws on one thread, without Python's lock.
    with ThreadPoolExecutor(min(len(blocks), torch.get_num_threads())) as threads:
        list(threads.map(draw, range(len(blocks))))
    return full


class GPT(nn.Module):
    """The unsharded model.

    Args:
        config: configuration of the model.
        seed: seed of weights and dropout.
        value: initial weights; None: `megads.model.gpt.initial_value`.
    """

    def __init__(self, config: ModelConfig, seed: int, value: InitialValue | None = None) -> None:
        super().__init__()
        config.check()
        self.config = config
        value = value or initial_value(config, seed)
        self.layer_names: list[str] = []
        self.layers = nn.ModuleList()
        for spec in layer_specs(config, seed):
            layer = spec.build()
            self.layer_names.append(spec.name)
            self.layers.append(layer)
            for name, parameter in layer.named_parameters():
                with torch.no_grad():
                    parameter.copy_(value(self._canonical(f"{spec.name}.{name}"), tuple(parameter.shape)))
        if config.tie_embeddings:
            self._tie()

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> GPT:
        """The model with uninitialized weights, to load a checkpoint into; allocates each weight once.

        Args:
            config: configuration of the model.
            device: device of the weights.
            dtype: dtype of the weights.
        """

        def nothing(_name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, device="meta")

        with torch.device("meta"):
            model = cls(config, seed=0, value=nothing).to(dtype)
        for layer in model.layers:
            if not (config.tie_embeddings and isinstance(layer, Head)):
                layer.to_empty(device=device)
        if config.tie_embeddings:
            model._tie()
        return model

    def _tie(self) -> None:
        embedding, head = self.layers[0], self.layers[-1]
        assert isinstance(embedding, Embedding) and isinstance(head, Head)
        head.tie(embedding)

    def _canonical(self, name: str) -> str:
        return TIED_PARAMETER if self.config.tie_embeddings and name == TIED_COPY else name

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its name in the whole model."""
        return {
            self._canonical(f"{layer_name}.{name}"): parameter
            for layer_name, layer in zip(self.layer_names, self.layers, strict=True)
            for name, parameter in layer.named_parameters()
        }

    def forward(self, tokens_bs: Tensor, info: BatchInfo) -> Tensor:
        """Returns logits [b, s, v]."""
        hidden = tokens_bs
        for layer in self.layers:
            hidden = layer(hidden, info)
        return hidden


def token_losses(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Cross entropy of every token in nats, fp32 (fp64 for fp64 logits) [b, s]."""
    logits = logits_bsv if logits_bsv.dtype.itemsize >= 4 else logits_bsv.float()
    return F.cross_entropy(logits.flatten(0, 1), labels_bs.flatten(), reduction="none").view_as(labels_bs)
