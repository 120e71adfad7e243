"""torchtitan's Llama as a peer of a training step, with megads' initial weights (torchtitan 0.2, for torch 2.11).

Trained as torchtitan trains on one GPU: fp32 weights and moments, blocks compiled one by one with fullgraph=True
(`apply_compile` of its llama3), torch.autocast in bf16 around the forward pass and torch's fused AdamW.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megads.model.config import ModelConfig
from megads.model.gpt import InitialValue
from scripts.bench.processes import Turn, UnavailableError
from scripts.bench.training_sides import TrainingWork, adamw, first_weights


def torchtitan_weights(model: ModelConfig, value: InitialValue) -> dict[str, Tensor]:
    """Returns megads' initial weights under torchtitan's names, fp32.

    megads stacks the queries, key and value of each group and interleaves gate and up. Its rotary embedding pairs the
    features i and i + d/2 of a head, torchtitan's pairs adjacent features.

    Args:
        model: a Llama-like model.
        value: returns a weight by megads' name and shape.
    """
    hidden, width, heads, group = model.hidden_size, model.head_dim, model.kv_heads, model.queries_per_kv

    def paired(rows_ndh: Tensor) -> Tensor:
        return rows_ndh.unflatten(-2, (2, width // 2)).transpose(-3, -2).reshape(-1, hidden)

    found = {
        "tok_embeddings.weight": value("embedding.word.weight", (model.vocabulary, hidden)),
        "norm.weight": value("final_norm.weight", (hidden,)),
        "output.weight": value("head.weight", (model.vocabulary, hidden)),
    }
    for layer in range(model.num_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        qkv = value(f"{ours}.attention.qkv.weight", (model.qkv_width, hidden)).view(heads, group + 2, width, hidden)
        gate_up = value(f"{ours}.mlp.gate_up.weight", (2 * model.ffn_width, hidden))
        found |= {
            f"{theirs}.attention.wq.weight": paired(qkv[:, :group]),
            f"{theirs}.attention.wk.weight": paired(qkv[:, group]),
            f"{theirs}.attention.wv.weight": qkv[:, group + 1].reshape(-1, hidden),
            f"{theirs}.attention.wo.weight": value(f"{ours}.attention.dense.weight", (hidden, hidden)),
            f"{theirs}.feed_forward.w1.weight": gate_up[0::2],
            f"{theirs}.feed_forward.w3.weight": gate_up[1::2],
            f"{theirs}.feed_forward.w2.weight": value(f"{ours}.mlp.down.weight", (hidden, model.ffn_width)),
            f"{theirs}.attention_norm.weight": value(f"{ours}.input_norm.weight", (hidden,)),
            f"{theirs}.ffn_norm.weight": value(f"{ours}.post_attention_norm.weight", (hidden,)),
        }
    return found


def torchtitan_model(work: TrainingWork) -> nn.Module:
    """Returns torchtitan's Transformer of the work's shape with megads' weights, in fp32.

    Raises:
        UnavailableError: torchtitan cannot be imported.
    """
    try:
        from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    except ImportError as error:
        raise UnavailableError(f"torchtitan cannot be imported ({error}): scripts/bench/gather_wheels.sh") from None
    model = work.model
    args: Any = TransformerModelArgs(
        dim=model.hidden_size, n_layers=model.num_layers, n_heads=model.num_heads, n_kv_heads=model.kv_heads,
        vocab_size=model.vocabulary, multiple_of=1, norm_eps=model.norm_eps, rope_theta=model.rope_theta,
        max_seq_len=work.seq_len, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        # torchtitan multiplies two thirds of 4 h by this, and rounds to whole numbers.
        ffn_dim_multiplier=(model.ffn_width + 0.5) / int(8 * model.hidden_size / 3),
    )  # fmt: skip
    with torch.device(work.device):
        peer: nn.Module = Transformer(args)
    peer.load_state_dict(torchtitan_weights(model, first_weights(work)), strict=False)
    return peer.train()


def torchtitan_side(work: TrainingWork, compiled: bool = True) -> Turn:
    """Returns a training step of torchtitan.

    Args:
        work: what is trained; its model is Llama-like.
        compiled: compile block by block, as torchtitan recommends.

    Raises:
        UnavailableError: torchtitan cannot be imported.
    """
    peer = torchtitan_model(work)
    if compiled:
        from torchtitan.config.job_config import Compile
        from torchtitan.models.llama3.infra.parallelize import apply_compile

        apply_compile(peer, Compile(enable=True))
    parameters = list(peer.parameters())
    optimizer = adamw(parameters, work.lr)
    batches = cycle([tokens_bs.to(work.device) for tokens_bs in work.token_batches()])
    tokens = work.batch * (work.seq_len - 1)

    def turn() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for tokens_bs in next(batches).split(work.micro_batch_size):
            labels_bs = tokens_bs.roll(-1, 1)
            labels_bs[:, -1] = -100
            with torch.autocast(work.device, work.dtype):
                logits_bsv = peer(tokens_bs)
                loss = functional.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten(), reduction="sum")
            (loss / tokens).backward()
            losses.append(loss.detach() / tokens)
        norm = torch.nn.utils.clip_grad_norm_(parameters, work.clip_grad)
        optimizer.step()
        return {"loss": torch.stack(losses).sum().item(), "grad_norm": norm.item()}

    return turn
