"""A GPT in plain PyTorch as a peer of a training step: what a user would write today without a framework.

Pre-norm blocks, learned positions and tied embeddings (Radford et al. 2019), `scaled_dot_product_attention`, the whole
model and its loss compiled as one graph, torch.autocast in bf16 around the forward pass, and torch's fused AdamW, which
keeps weights and moments in fp32. The weights are megads' initial ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import InitialValue
from megads.ops.compiler import compiled as compile_module
from scripts.bench.processes import Turn, UnavailableError
from scripts.bench.training_sides import TrainingWork, autocast_side, first_weights


class PlainBlock(nn.Module):
    """Attention and MLP, each on the normalized input and added to it.

    Args:
        hidden: features, h.
        heads: attention heads, n.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Returns [b, s, h]."""
        parts_bsh = self.qkv(self.input_norm(x_bsh)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts_bsh)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_bsh = x_bsh + self.dense(attended.transpose(1, 2).flatten(2))
        return x_bsh + self.down(functional.gelu(self.up(self.mlp_norm(x_bsh)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The model and its loss.

    Args:
        model: a model like GPT-2.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(model.vocabulary, model.hidden_size)
        self.position = nn.Embedding(model.max_seq_len, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model.hidden_size, model.num_heads) for _ in range(model.num_layers))
        self.final_norm = nn.LayerNorm(model.hidden_size)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """Returns the cross entropy summed over all labels that are not -100, an fp32 scalar."""
        hidden_bsh = self.word(tokens_bs) + self.position.weight[: tokens_bs.shape[1]]
        for block in self.blocks:
            hidden_bsh = block(hidden_bsh)
        logits_bsv = functional.linear(self.final_norm(hidden_bsh), self.word.weight)
        return functional.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten(), reduction="sum")


def plain_weights(model: ModelConfig, value: InitialValue) -> dict[str, Tensor]:
    """Returns megads' initial weights under the names of `PlainGPT`, fp32.

    megads stacks the query, key and value of each head; the plain model those of all heads.

    Args:
        model: a model like GPT-2.
        value: returns a weight by megads' name and shape.
    """
    hidden, heads = model.hidden_size, model.num_heads
    found = {
        "word.weight": value("embedding.word.weight", (model.vocabulary, hidden)),
        "position.weight": value("embedding.position.weight", (model.max_seq_len, hidden)),
    }
    norms = {"final_norm": "final_norm"}
    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        norms |= {f"{block}.input_norm": f"{block}.input_norm", f"{block}.mlp_norm": f"{block}.post_attention_norm"}
        for name, ours, out_features, in_features in (
            ("qkv", "attention.qkv", 3 * hidden, hidden), ("dense", "attention.dense", hidden, hidden),
            ("up", "mlp.up", 4 * hidden, hidden), ("down", "mlp.down", hidden, 4 * hidden),
        ):  # fmt: skip
            weight = value(f"{block}.{ours}.weight", (out_features, in_features))
            bias = value(f"{block}.{ours}.bias", (out_features,))
            if name == "qkv":
                weight, bias = (of.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2) for of in (weight, bias))
            found |= {f"{block}.{name}.weight": weight, f"{block}.{name}.bias": bias}
    for name, ours in norms.items():
        found |= {f"{name}.{kind}": value(f"{ours}.{kind}", (hidden,)) for kind in ("weight", "bias")}
    return found


def plain_side(work: TrainingWork, compiled: bool = True) -> Turn:
    """Returns a training step of the plain model.

    Args:
        work: what is trained.
        compiled: compile model and loss as one graph.

    Raises:
        UnavailableError: the model of the work is not like GPT-2.
    """
    model = work.model
    like_gpt2 = (model.position, model.norm, model.mlp, model.bias, model.tie_embeddings, model.embedding_norm) == (
        Position.learned, NormKind.layernorm, MLPKind.gelu, True, True, False,
    )  # fmt: skip
    if not like_gpt2:
        raise UnavailableError("the plain GPT has learned positions, LayerNorm, GELU, biases and tied embeddings only")
    with torch.device(work.device):
        peer = PlainGPT(model)
    peer.load_state_dict(plain_weights(model, first_weights(work)))
    call = compile_module(peer) if compiled else peer
    return autocast_side(work, list(peer.parameters()), call)
