"""Plain torch on one process: what every layout is compared with."""

from __future__ import annotations

import torch

from megads.model.gpt import GPT
from megads.model.loss import token_losses
from megads.model.stages import TIED_PARAMETER
from megads.optim.groups import parameter_groups
from megads.verify.run import Run
from megads.verify.scenario import (
    VALIDATION_SAMPLES,
    Scenario,
    initial_weights,
    micro_batch,
    step_batches,
)


def train_reference(scenario: Scenario) -> Run:
    """Autograd, fp32 gradient sums over micro-batches, clip, AdamW on fp32 masters."""
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).to(scenario.dtype)
    working = model.parameters_by_name()
    masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in working.items()}
    tied = TIED_PARAMETER if scenario.model.tie_embeddings else None
    groups = parameter_groups(masters.items(), tied_name=tied, weight_decay=scenario.optim.weight_decay)
    beta1, beta2 = scenario.optim.betas
    adamw = torch.optim.AdamW(groups, lr=scenario.lr, betas=(beta1, beta2), eps=scenario.optim.eps)
    run = Run(validation=_validate(model, scenario), model=scenario.model)
    run.initial = {name: m.detach().numpy().copy() for name, m in masters.items()}
    for step in range(scenario.steps):
        loss, tokens, gradients = _gradients(model, scenario, step)
        for name, master in masters.items():
            master.grad = gradients[name]
        if step == 0:
            run.gradients = {name: g.numpy().copy() for name, g in gradients.items()}
        limit = scenario.clip_grad or float("inf")
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit, foreach=False)))
        run.losses.append(loss)
        run.tokens.append(tokens)
        adamw.step()
        with torch.no_grad():
            for name, p in working.items():
                p.copy_(masters[name])
    run.weights = {name: m.detach().numpy() for name, m in masters.items()}
    return run


def _gradients(model: GPT, scenario: Scenario, step: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, unmasked tokens and fp32 gradients of one step: the mean over all the tokens of its global batch."""
    batches = step_batches(scenario, step)
    working = model.parameters_by_name()
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in working.items()}
    total = sum(float(b.loss_mask_bs.sum()) for b in batches if b.loss_mask_bs is not None)
    loss_sum = 0.0
    for batch in batches:
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        logits = model(batch.tokens_bs, batch.info)
        loss = (token_losses(logits, batch.labels_bs) * batch.loss_mask_bs).sum() / total
        model.zero_grad(set_to_none=True)
        loss.backward()
        loss_sum += loss.item()
        for name, p in working.items():
            assert p.grad is not None
            gradients[name] += p.grad.float()
    return loss_sum, int(total), gradients


@torch.no_grad()
def _validate(model: GPT, scenario: Scenario) -> tuple[float, int]:
    loss_sum, tokens = 0.0, 0
    model.eval()
    for sample_id in range(VALIDATION_SAMPLES):
        batch = micro_batch(scenario, [sample_id])
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        losses = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs)
        loss_sum += float((losses * batch.loss_mask_bs).sum())
        tokens += int(batch.loss_mask_bs.sum())
    model.train()
    return loss_sum, tokens
