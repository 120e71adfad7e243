"""torchtitan's Llama and Qwen3-MoE as peers of a training step, with megads' initial weights (torchtitan 0.2, for torch
2.11).

Trained as torchtitan trains on one GPU: fp32 weights and moments, blocks compiled one by one with fullgraph=True
(`apply_compile` of its llama3, and of its llama4 for experts, whose GEMMs are one kernel), torch.autocast in bf16
around the forward pass and torch's fused AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megads.model.config import ModelConfig
from megads.model.gpt import InitialValue
from scripts.bench.processes import Turn, UnavailableError
from scripts.bench.training_sides import TrainingWork, autocast_side, first_weights


def torchtitan_weights(model: ModelConfig, value: InitialValue) -> dict[str, Tensor]:
    """Returns megads' initial weights under torchtitan's names, fp32.

    megads stacks the queries, key and value of each group and interleaves gate and up. Its rotary embedding pairs the
    features i and i + d/2 of a head, torchtitan's Llama pairs adjacent features. The second projection of megads'
    experts is transposed.

    Args:
        model: a Llama-like model, or a Qwen3-MoE-like one.
        value: returns a weight by megads' name and shape.
    """
    hidden, width, heads, group = model.hidden_size, model.head_dim, model.kv_heads, model.queries_per_kv

    def paired(rows_ndh: Tensor) -> Tensor:
        if model.moe.enabled:
            return rows_ndh.reshape(-1, hidden)
        return rows_ndh.unflatten(-2, (2, width // 2)).transpose(-3, -2).reshape(-1, hidden)

    found = {
        "tok_embeddings.weight": value("embedding.word.weight", (model.vocabulary, hidden)),
        "norm.weight": value("final_norm.weight", (hidden,)),
        "output.weight": value("head.weight", (model.vocabulary, hidden)),
    }
    for layer in range(model.num_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        qkv = value(f"{ours}.attention.qkv.weight", (model.qkv_width, hidden)).view(heads, group + 2, width, hidden)
        found |= {
            f"{theirs}.attention.wq.weight": paired(qkv[:, :group]),
            f"{theirs}.attention.wk.weight": paired(qkv[:, group]),
            f"{theirs}.attention.wv.weight": qkv[:, group + 1].reshape(-1, hidden),
            f"{theirs}.attention.wo.weight": value(f"{ours}.attention.dense.weight", (hidden, hidden)),
            f"{theirs}.attention_norm.weight": value(f"{ours}.input_norm.weight", (hidden,)),
            f"{theirs}.ffn_norm.weight": value(f"{ours}.post_attention_norm.weight", (hidden,)),
        }
        if model.qk_norm:
            for theirs_of, ours_of in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
                name = f"{theirs}.attention.{theirs_of}.weight"
                found[name] = value(f"{ours}.attention.{ours_of}.weight", (width,))
        if model.moe.enabled:
            experts, features = model.moe.num_experts, model.expert_width
            gate_up = value(f"{ours}.mlp.experts.gate_up.weight", (experts * 2 * features, hidden)).view(
                experts, -1, hidden
            )
            down = value(f"{ours}.mlp.experts.down.weight", (experts * features, hidden)).view(experts, -1, hidden)
            found |= {
                f"{theirs}.moe.router.gate.weight": value(f"{ours}.mlp.router.weight", (experts, hidden)),
                f"{theirs}.moe.experts.w1": gate_up[:, 0::2],
                f"{theirs}.moe.experts.w3": gate_up[:, 1::2],
                f"{theirs}.moe.experts.w2": down.mT,
            }
        else:
            gate_up = value(f"{ours}.mlp.gate_up.weight", (2 * model.ffn_width, hidden))
            found |= {
                f"{theirs}.feed_forward.w1.weight": gate_up[0::2],
                f"{theirs}.feed_forward.w3.weight": gate_up[1::2],
                f"{theirs}.feed_forward.w2.weight": value(f"{ours}.mlp.down.weight", (hidden, model.ffn_width)),
            }
    return found


def torchtitan_model(work: TrainingWork) -> nn.Module:
    """Returns torchtitan's model of the work's shape with megads' weights, in fp32.

    Raises:
        UnavailableError: torchtitan cannot be imported.
    """
    try:
        peer = _qwen3_moe(work) if work.model.moe.enabled else _llama(work)
    except ImportError as error:
        raise UnavailableError(f"torchtitan cannot be imported ({error}): scripts/bench/gather_wheels.sh") from None
    weights = torchtitan_weights(work.model, first_weights(work))
    missing = {name for name, _ in peer.named_parameters()} ^ weights.keys()
    assert not missing, missing
    peer.load_state_dict(weights, strict=False)
    return peer.train()


def _llama(work: TrainingWork) -> nn.Module:
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

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
    return peer


def _qwen3_moe(work: TrainingWork) -> nn.Module:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    model, moe = work.model, work.model.moe
    experts: Any = MoEArgs(
        num_experts=moe.num_experts, num_shared_experts=0, score_func=moe.score.value, route_norm=moe.normalize_weights,
        route_scale=moe.routed_scale, score_before_experts=False, top_k=moe.top_k, load_balance_coeff=None,
        use_grouped_mm=work.device == "cuda",
    )  # fmt: skip
    args: Any = Qwen3ModelArgs(
        dim=model.hidden_size, n_layers=model.num_layers, n_heads=model.num_heads, n_kv_heads=model.kv_heads,
        vocab_size=model.vocabulary, head_dim=model.head_dim, norm_eps=model.norm_eps, rope_theta=model.rope_theta,
        qk_norm=model.qk_norm, max_seq_len=work.seq_len, moe_enabled=True, moe_inter_dim=model.expert_width,
        moe_args=experts,
    )  # fmt: skip
    with torch.device(work.device):
        peer: nn.Module = Qwen3Model(args)
    return peer


def torchtitan_side(work: TrainingWork, compiled: bool = True) -> Turn:
    """Returns a training step of torchtitan.

    Args:
        work: what is trained; its model is like Llama or Qwen3-MoE.
        compiled: compile block by block, as torchtitan recommends.

    Raises:
        UnavailableError: torchtitan cannot be imported, or its router does not run on a CPU.
    """
    if work.model.moe.enabled and work.device == "cpu":
        raise UnavailableError("torchtitan's router counts tokens with an operator that CPUs lack (histc of integers)")
    peer = torchtitan_model(work)
    if compiled:
        from torchtitan.config.job_config import Compile

        if work.model.moe.enabled:
            from torchtitan.models.llama4.infra.parallelize import apply_compile as compile_experts

            compile_experts(peer, Compile(enable=True), False)
        else:
            from torchtitan.models.llama3.infra.parallelize import apply_compile

            apply_compile(peer, Compile(enable=True))

    def summed_loss(tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        logits_bsv = peer(tokens_bs)
        return functional.cross_entropy(logits_bsv.flatten(0, 1).float(), labels_bs.flatten(), reduction="sum")

    return autocast_side(work, list(peer.parameters()), summed_loss)
