"""One training step of the same model: megads' engine, Hugging Face's model with torch's AdamW, and a limit.

Hugging Face's model is of the architecture of transformers that `megads export` chooses, such as BLOOM or Qwen3-MoE.
All start with the same weights, see the same tokens, clip at the same norm and decay the same parameters. Hugging Face
shifts labels itself and excludes the last position of a sample, so megads' side masks it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatch
from megads.model.config import ModelConfig
from megads.model.gpt import GPT, InitialValue, initial_value, parameter_generator
from megads.model.model_size import model_flops_per_token
from megads.ops.attention_kinds import AttentionKind
from megads.ops.compiler import compiled as compile_module
from megads.ops.config import (
    FUSED,
    TORCH,
    Compile,
    Float8,
    Float8Recipe,
    Implementation,
    KernelOp,
    Kernels,
    OpsConfig,
)
from megads.optim.config import OptimConfig
from megads.tools.convert.architectures import choose_architecture
from megads.tools.convert.weights import to_hugging_face
from scripts.bench.processes import Turn, UnavailableError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIM = OptimConfig(lr=1e-3, clip_grad=1.0)
SEED = 1
BATCHES = 8
GEMM_SIZES = (1024, 2048)
GEMM_S = 0.5


@dataclass(frozen=True)
class TrainingWork:
    """What every side trains.

    Attributes:
        layers, hidden, heads, vocabulary: model shape.
        batch, seq_len: samples per step, tokens per sample.
        precision: a key of DTYPES.
        device: cpu or cuda.
        micro_batch: samples per forward pass, a divisor of batch; None: all of them.
        recompute: parallel.recompute of megads' sides.
        lr: learning rate of every step.
        attention: model.attention of megads' sides.
        loss_chunk: ops.loss_chunk of megads' sides.
        shape: the whole model, if it is not like BLOOM; layers, hidden, heads and vocabulary are then the same.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    vocabulary: int = 32000
    batch: int = 4
    seq_len: int = 512
    precision: str = "fp32"
    device: str = "cpu"
    micro_batch: int | None = None
    recompute: str = "none"
    lr: float = OPTIM.lr
    attention: str = "auto"
    loss_chunk: int | None = None
    shape: ModelConfig | None = None

    @cached_property
    def model(self) -> ModelConfig:
        if self.shape is not None:
            return replace(self.shape, attention=AttentionKind(self.attention))
        return ModelConfig(
            num_layers=self.layers, hidden_size=self.hidden, num_heads=self.heads, vocab_size=self.vocabulary,
            max_seq_len=self.seq_len, attention=AttentionKind(self.attention),
        )  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def clip_grad(self) -> float:
        """Clipping norm of all sides."""
        return OPTIM.clip_grad

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass."""
        return self.micro_batch or self.batch

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq_len

    @property
    def flops(self) -> int:
        """Model FLOPs of a step as counted by megads.model.model_size."""
        return self.tokens * model_flops_per_token(self.model, self.seq_len)

    @property
    def text(self) -> str:
        return (
            f"{self.layers} layers x {self.hidden}, {self.heads} heads, V {self.vocabulary}, B{self.batch} "
            f"S{self.seq_len}, {self.precision}"
        )

    def token_batches(self) -> list[Tensor]:
        """int64 [b, s] each; frequencies follow Zipf's law, so that there is something to learn."""
        random = np.random.default_rng(SEED)
        cumulated = np.cumsum(1.0 / np.arange(1, self.vocabulary + 1))
        drawn = random.random((BATCHES, self.batch, self.seq_len)) * cumulated[-1]
        return list(torch.from_numpy(np.searchsorted(cumulated, drawn)).clamp_(max=self.vocabulary - 1))


def first_weights(work: TrainingWork) -> InitialValue:
    """Initial weights of all sides: megads' own on a CPU; on a GPU generated there, because that is faster.

    The latter have the same distributions, except that the last projections of the branches are not scaled down.
    """
    if work.device == "cpu":
        return initial_value(work.model, SEED)

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device="cpu")
        generator = torch.Generator(work.device).manual_seed(parameter_generator(SEED, name).initial_seed())
        drawn = torch.empty(shape, device=work.device).normal_(0.0, work.model.weight_std, generator=generator)
        return drawn.cpu()

    return value


def float8_of(work: TrainingWork, recipe: Float8Recipe) -> Float8:
    """Which linear layers of a model multiply in FP8; of a smoke test's model all."""
    return Float8(recipe, bf16_blocks=min(1, (work.model.num_layers - 1) // 2))


def megads_side(
    work: TrainingWork,
    implementation: str,
    compiled: str = "none",
    *,
    deterministic: bool = True,
    cuda_graphs: bool | str = False,
    left_to_torch: frozenset[KernelOp] = frozenset(),
    fp8: Float8Recipe = Float8Recipe.none,
    offload: bool = False,
    mlp_chunk: int | None = None,
) -> Turn:
    """The real engine with one rank; bf16 keeps fp32 master weights and fp32 gradients.

    Args:
        work: what is trained.
        implementation: ops.impl.
        compiled: ops.compile.
        deterministic: train.deterministic.
        cuda_graphs: ops.cuda_graphs.
        left_to_torch: operators for which ops.impl=fused does not apply.
        fp8: train.fp8, in all blocks but the first and the last.
        offload: parallel.offload=activations.
        mlp_chunk: ops.mlp_chunk.

    Raises:
        UnavailableError: the kernels cannot be had.
    """
    import torch.distributed as dist

    from megads.engine import build_train_engine
    from megads.engine.interface import EngineSpec, PassTimes
    from megads.errors import ConfigError
    from megads.ops.resolve import load
    from megads.parallel.config import Offload, ParallelConfig, Recompute
    from megads.parallel.grid import build_grid
    from megads.runtime.process import make_deterministic
    from megads.tools.autotune.attention_trials import tune_attention
    from megads.tools.autotune.graphs import decide

    cuda = work.device == "cuda"
    try:
        asked_ops = OpsConfig(
            Implementation(implementation), Compile(compiled), cuda_graphs, work.loss_chunk, mlp_chunk
        )
        ops = load(asked_ops, print, cuda=cuda)
    except ConfigError as error:
        raise UnavailableError(str(error)) from None
    if left_to_torch:
        ops = replace(ops, model=Implementation.auto, tuned=frozenset(KernelOp) - left_to_torch)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    offloaded = Offload.activations if offload else Offload.none
    layout = ParallelConfig(recompute=Recompute(work.recompute), offload=offloaded)
    device = torch.device("cuda", 0) if cuda else torch.device(work.device)
    if deterministic:
        make_deterministic(device)
    asked = replace(
        work.model.attention_work(), bf16=work.precision == "bf16", cuda=cuda, impl=ops.model, seq_len=work.seq_len,
        micro_batch_size=work.micro_batch_size, deterministic=deterministic,
    )  # fmt: skip
    attention = tune_attention(work.model, asked, device)
    print(f"attention: {attention.text}", flush=True)
    spec = EngineSpec(
        replace(work.model, attention=attention.kind), layout, OPTIM, build_grid(layout, 0, 1), precision=work.dtype,
        micro_batch_size=work.micro_batch_size, seed=SEED, device=device,
        value=first_weights(work), kernels=ops, float8=float8_of(work, fp8),
    )  # fmt: skip
    engine = build_train_engine(spec)
    batches = cycle([_micro_batches(work, tokens_bs) for tokens_bs in work.token_batches()])

    def choose(times: PassTimes) -> bool:
        decision = decide([times])
        print(decision.text, flush=True)
        return decision.captured

    def turn() -> dict[str, float]:
        result = engine.step(next(batches), work.lr)
        assert not result.skipped
        if ops.cuda_graphs is None:
            engine.choose_cuda_graphs(choose)
        return {"loss": result.loss, "grad_norm": result.grad_norm}

    return turn


def _micro_batches(work: TrainingWork, tokens_bs: Tensor) -> list[MicroBatch]:
    """One step of megads' sides; the last position of a sample, which Hugging Face excludes, is masked."""
    found = []
    for first in range(0, work.batch, work.micro_batch_size):
        part_bs = tokens_bs[first : first + work.micro_batch_size]
        mask_bs = torch.ones(part_bs.shape)
        mask_bs[:, -1] = 0.0
        info = BatchInfo(torch.arange(first, first + len(part_bs)), seq_len=work.seq_len)
        found.append(MicroBatch(info, part_bs, part_bs.roll(-1, 1), mask_bs))
    return found


def hugging_face_model(work: TrainingWork, value: InitialValue | None = None) -> nn.Module:
    """The model of transformers with megads' weights in the precision of the work.

    Args:
        work: what is trained.
        value: initial weights; None is `first_weights`.

    Raises:
        ConfigError: no architecture of transformers computes the model.
        UnavailableError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        remedy = "pip install -c constraints.txt 'megads[bench]'"
        raise UnavailableError(f"transformers cannot be imported ({error}): {remedy}") from None
    architecture = choose_architecture(work.model, "auto")
    with torch.device(work.device):
        source = GPT(work.model, SEED, value or first_weights(work))
    ours = {name: weight.detach() for name, weight in source.parameters_by_name().items()}
    # transformers converts the hub's tensors, for example those of single experts, to its own.
    model, loaded = getattr(transformers, architecture.class_name).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(**architecture.config_json(work.model), use_cache=False),
        state_dict=to_hugging_face(work.model, architecture.names_of(work.model), ours),
        dtype=work.dtype,
        output_loading_info=True,
    )
    if any(loaded.values()):
        raise ValueError(f"parameters of only one of the two models: {loaded}; are they of the same shape?")
    peer: nn.Module = model
    return peer.to(work.device).train()


def hugging_face_side(work: TrainingWork, compiled: bool, autocast: bool = False) -> Turn:
    """transformers' model and AdamW(fused), trained as usual; in bf16, weights and optimizer are bf16.

    Args:
        work: what is trained.
        compiled: use torch.compile.
        autocast: keep weights and optimizer in fp32 and compute under torch.autocast in bf16, as the Trainer does with
            bf16=True.

    Raises:
        UnavailableError: transformers is not installed.
    """
    model = hugging_face_model(replace(work, precision="fp32") if autocast else work)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, work.lr)
    call = compile_module(model) if compiled else model
    batches = cycle([tokens_bs.to(work.device) for tokens_bs in work.token_batches()])
    share = work.micro_batch_size / work.batch

    def turn() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for tokens_bs in next(batches).split(work.micro_batch_size):
            with torch.autocast(work.device, work.dtype, enabled=autocast):
                loss = call(input_ids=tokens_bs, labels=tokens_bs).loss * share
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, OPTIM.clip_grad)
        optimizer.step()
        return {"loss": torch.stack(losses).sum().item(), "grad_norm": norm.item()}

    return turn


def autocast_side(
    work: TrainingWork, parameters: list[nn.Parameter], summed_loss: Callable[[Tensor, Tensor], Tensor]
) -> Turn:
    """A peer's training step under torch.autocast with torch's fused AdamW; weights and moments are fp32.

    Args:
        work: what is trained.
        parameters: the peer's, fp32.
        summed_loss: cross entropy summed over the labels that are not -100, of tokens and labels, int64 [b, s] each.
    """
    optimizer = adamw(parameters, work.lr)
    batches = cycle([tokens_bs.to(work.device) for tokens_bs in work.token_batches()])
    tokens = work.batch * (work.seq_len - 1)

    def turn() -> dict[str, float]:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for tokens_bs in next(batches).split(work.micro_batch_size):
            labels_bs = tokens_bs.roll(-1, 1)
            labels_bs[:, -1] = -100
            with torch.autocast(work.device, work.dtype, enabled=work.precision != "fp32"):
                loss = summed_loss(tokens_bs, labels_bs) / tokens
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(parameters, work.clip_grad)
        optimizer.step()
        return {"loss": torch.stack(losses).sum().item(), "grad_norm": norm.item()}

    return turn


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Torch's fused AdamW, with weight decay on the same parameters as megads."""
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False))
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr, betas=(OPTIM.betas[0], OPTIM.betas[1]), eps=OPTIM.eps, fused=True,
    )  # fmt: skip


def machine_side(work: TrainingWork) -> Turn:
    """The fastest GEMM of the dtype, torch's and megads' if it has one, and the fastest copy."""
    from megads.ops.linear import linear_into
    from megads.ops.resolve import load

    kernels = load(OpsConfig(), print, cuda=False).fused(KernelOp.linear)
    triples = [[torch.randn(size, size).to(work.dtype) for _ in range(3)] for size in GEMM_SIZES]
    source = torch.zeros(2**26, dtype=torch.uint8)
    target = torch.ones_like(source)

    def fastest_s(call: Callable[[], object]) -> float:
        best, stop = float("inf"), time.perf_counter() + GEMM_S / len(triples)
        while time.perf_counter() < stop:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
        return best

    def flops_per_s(kernels: Kernels) -> float:
        return max(
            2 * len(left) ** 3 / fastest_s(partial(linear_into, out, left, right, kernels))
            for left, right, out in triples
        )

    def turn() -> dict[str, float]:
        torchs = flops_per_s(TORCH)
        best = max(torchs, flops_per_s(FUSED)) if kernels else torchs
        copied = 2 * source.numel() / fastest_s(partial(target.copy_, source))
        return {"torch_flops_per_s": torchs, "flops_per_s": best, "copied_bytes_per_s": copied}

    return turn
