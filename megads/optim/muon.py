"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): updates are orthogonalized momentum matrices.

Updates are scaled by 0.2 sqrt(max(rows, columns)), to match the RMS of AdamW's updates (Liu et al. 2025, Moonlight,
https://arxiv.org/abs/2502.16982, section 2.2). Only whole matrices can be orthogonalized: each one is owned by one of
the ranks that shard it, which receives all shards and sends the results back. Fused parameters (queries, keys and
values; gates and ups) are split into their matrices first, as Jordan recommends; otherwise the matrices would be
orthogonalized jointly. Each expert's matrices are owned by ranks that hold the expert.

Shape suffixes: e = elements of a flat master or parameter, r = rows, c = columns, k = matrices of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megads.ops.config import TORCH, KernelOp, Kernels
from megads.ops.linear import input_gradient, linear, needs_widening
from megads.optim.config import MUON_BATCH_ELEMENTS, MuonOptions, MuonPrecision, OptimConfig, QKVSplit
from megads.optim.groups import Role
from megads.optim.masters import AdamWRule, MasterLayout, MasterUpdate, ParameterRun, by_group
from megads.parallel.grid import Axis

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients of X, X X^T X and (X X^T)^2 X: singular values converge to 0.7-1.2, also small ones quickly."""
RMS = 0.2
"""Root mean square of AdamW's updates, as measured by Moonlight."""
EPSILON = 1e-7

GRAM_BLOCKS, SMALLEST_BLOCK = 4, 64
"""Number of block rows of a Gram matrix on a CPU, and minimum rows per block for which blocking is faster."""

FusedRows = Mapping[str, tuple[int, ...]]
"""Name suffix of a fused parameter -> numbers of adjacent rows of its matrices; the pattern repeats over all rows."""


def newton_schulz(x_krc: Tensor, steps: int, kernels: Kernels = TORCH) -> Tensor:
    """Orthogonalizes matrices by Newton-Schulz iteration, approximately to U V^T of their SVD.

    Iterates in the matrices' dtype, or in fp32 on CPUs on which PyTorch has no GEMM for it.

    Args:
        x_krc: matrices of one shape, zeros allowed; undefined afterwards.
        steps: number of iterations.
        kernels: implementation of fp32 GEMMs on CPUs.
    """
    if needs_widening(x_krc):
        return newton_schulz(x_krc.float(), steps, kernels).to(x_krc.dtype)
    if x_krc.shape[1] > x_krc.shape[2]:
        return newton_schulz(x_krc.mT.contiguous(), steps, kernels).mT
    norms_k = torch.linalg.vector_norm(x_krc, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x_krc = (x_krc / norms_k.clamp(min=EPSILON)).to(x_krc.dtype)
    # In bf16, PyTorch's batched GEMMs are faster at every measured size (docs/notes/optimizers.md).
    if kernels.fused(KernelOp.linear) and x_krc.device.type == "cpu" and x_krc.dtype == torch.float32:
        return torch.stack([_iterate_by_kernel(x_rc, steps, kernels) for x_rc in x_krc])
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram_krr = torch.bmm(x_krc, x_krc.mT)
        polynomial_krr = torch.baddbmm(gram_krr, gram_krr, gram_krr, beta=b, alpha=c)
        x_krc = torch.baddbmm(x_krc, polynomial_krr, x_krc, beta=a)
    return x_krc


def _iterate_by_kernel(x_rc: Tensor, steps: int, kernels: Kernels) -> Tensor:
    """Newton-Schulz iteration of one matrix with megads' GEMM kernels, which are faster than PyTorch's on some CPUs."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram_rr = gram_matrix(x_rc, kernels)
        # gram_rr is symmetric, so its Gram matrix is its square.
        polynomial_rr = gram_matrix(gram_rr, kernels).mul_(c).add_(gram_rr, alpha=b)
        x_rc = input_gradient(polynomial_rr, x_rc, kernels).add_(x_rc, alpha=a)
    return x_rc


def gram_matrix(x_rc: Tensor, kernels: Kernels) -> Tensor:
    """X X^T; copies blocks below the diagonal from those above it, which leaves 5/8 of the FLOPs.

    Args:
        x_rc: one matrix.
        kernels: implementation of the GEMMs.
    """
    rows = len(x_rc)
    size = -(-rows // GRAM_BLOCKS)
    if size < SMALLEST_BLOCK:
        return linear(x_rc, x_rc, None, kernels)
    out_rr = x_rc.new_empty(rows, rows)
    for start in range(0, rows, size):
        stop = min(rows, start + size)
        out_rr[start:stop, start:] = linear(x_rc[start:stop], x_rc[start:], None, kernels)
        out_rr[stop:, start:stop] = out_rr[start:stop, stop:].T
    return out_rr


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of orthogonalizing one matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short**2 * long + 2 * short**3)


class FusedMatrices:
    """Splits fused parameters into their matrices.

    Args:
        rows: row patterns of fused parameters.
        split: whether queries, keys and values are one matrix each, or one per head.
    """

    def __init__(self, rows: FusedRows, split: QKVSplit) -> None:
        self._rows, self._split = rows, split

    def _pattern(self, name: str) -> tuple[int, ...] | None:
        return next((rows for suffix, rows in self._rows.items() if name.endswith(suffix)), None)

    def split(self, name: str, whole_rc: Tensor) -> list[Tensor]:
        """Splits a parameter into its matrices.

        Args:
            name: name of the parameter.
            whole_rc: tensor of the parameter's shape.
        """
        pattern = self._pattern(name)
        if pattern is None:
            return [whole_rc]
        if self._split is QKVSplit.head and pattern[-1] > 1:
            return list(whole_rc.unflatten(0, (-1, pattern[-1])).unbind())
        parts = whole_rc.unflatten(0, (-1, sum(pattern))).split(pattern, dim=1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, name: str, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        pattern = self._pattern(name)
        if pattern is None:
            return matrices[0]
        if self._split is QKVSplit.head and pattern[-1] > 1:
            return torch.cat(list(matrices))
        parts = [part.unflatten(0, (-1, rows)) for part, rows in zip(matrices, pattern, strict=True)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def flops(self, name: str, shape: tuple[int, ...], steps: int) -> int:
        """FLOPs of orthogonalizing all matrices of a parameter."""
        matrices = self.split(name, torch.empty(shape, device="meta"))
        return sum(newton_schulz_flops(matrix.shape[0], matrix.shape[1], steps) for matrix in matrices)


def assign_owners(costs: Sequence[int], owners: int) -> list[int]:
    """Assigns items to owners by greedy load balancing: the largest item first, to the owner with the least load.

    Args:
        costs: cost of each item.
        owners: number of owners.

    Returns:
        The owner of each item.
    """
    loads, found = [0] * owners, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        found[item] = min(range(owners), key=lambda owner: (loads[owner], owner))
        loads[found[item]] += costs[item]
    return found


def all_to_all_pieces(
    axis: Axis, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[int]], like: Tensor
) -> list[list[Tensor]]:
    """Exchanges flat tensors between the ranks of an axis, in one all-to-all.

    Args:
        axis: the ranks.
        outgoing: tensors to send to each rank, all of one dtype.
        incoming: number of elements of each tensor to receive from each rank.
        like: tensor with the dtype and device of the tensors to send, of which there may be none.

    Returns:
        The tensors received from each rank.
    """
    flat = [tensor for row in outgoing for tensor in row]
    sizes = [sum(row) for row in incoming]
    given = torch.cat(flat) if flat else like.new_empty(0)
    taken = given.new_empty(sum(sizes))
    if axis.size > 1:
        splits = [sum(tensor.numel() for tensor in row) for row in outgoing]
        dist.all_to_all_single(taken, given, sizes, splits, group=axis.group)
    else:
        taken = given
    parts = iter(taken.split([size for row in incoming for size in row]))
    return [[next(parts) for _ in row] for row in incoming]


@dataclass(frozen=True)
class OwnedMatrix:
    """A parameter and the rank that orthogonalizes it.

    Attributes:
        run: this rank's range of the parameter.
        held: first element and length of every data rank's range, in the flattened local parameter.
        data: the owner's rank on the data axis.
        tp: the owner's rank on the tensor-parallel axis.
    """

    run: ParameterRun
    held: tuple[tuple[int, int], ...]
    data: int
    tp: int


class WholeMatrices:
    """Gathers sharded parameters to their owners, and scatters the owners' results back.

    Gathers over the data axis first, which completes a tensor-parallel shard, then over the tensor-parallel axis.

    Args:
        layouts: layouts of the masters that hold the parameters, all of one group.
        matrices: splits fused parameters into matrices.
        steps: number of Newton-Schulz iterations, for load balancing.
        like: tensor with the dtype and device of the tensors to communicate.
    """

    def __init__(self, layouts: Sequence[MasterLayout], matrices: FusedMatrices, steps: int, like: Tensor) -> None:
        self._group, self._like = layouts[0].group, like.new_empty(0)
        data, tp = self._group.data, self._group.tp
        runs = [run for layout in layouts for run in layout.runs]
        costs = [matrices.flops(run.name, self._whole_shape(run), steps) for run in runs]
        owners = assign_owners(costs, data.size * tp.size)
        held = self._held_everywhere(runs)
        self.parameters = [
            OwnedMatrix(run, ranges, *divmod(owner, tp.size))
            for run, ranges, owner in zip(runs, held, owners, strict=True)
        ]

    def _whole_shape(self, run: ParameterRun) -> tuple[int, ...]:
        assert run.dim is not None or self._group.tp.size == 1, f"{run.name} is on every tensor-parallel rank"
        return tuple(size * (self._group.tp.size if dim == run.dim else 1) for dim, size in enumerate(run.local_shape))

    def _held_everywhere(self, runs: Sequence[ParameterRun]) -> list[tuple[tuple[int, int], ...]]:
        """First element and length of every data rank's range of each parameter; collective if masters are sharded."""
        data = self._group.data
        if not self._group.sharded or data.size == 1:
            return [((0, run.local_elements),) * data.size for run in runs]
        own = torch.tensor([[run.first, run.length] for run in runs], dtype=torch.int64, device=self._like.device)
        own = own.flatten()
        everyones = own.new_empty(data.size * own.numel())
        dist.all_gather_into_tensor(everyones, own, group=data.group)
        by_rank = everyones.view(data.size, len(runs), 2).tolist()
        return [tuple((first, length) for first, length in of_run) for of_run in zip(*by_rank, strict=True)]

    def gather(self, runs: Sequence[Tensor]) -> dict[int, Tensor]:
        """The whole parameters that this rank owns, by index in `parameters`.

        Args:
            runs: this rank's range of every parameter, flat.
        """
        return self._over_tp(self._over_data(runs))

    def scatter(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """This rank's range of every parameter, flat.

        Args:
            whole: results for the whole parameters that `gather` returned.
        """
        return self._back_over_data(self._back_over_tp(whole))

    def _over_data(self, runs: Sequence[Tensor]) -> dict[int, Tensor]:
        """This rank's tensor-parallel shard of each parameter whose owner has the same rank on the data axis."""
        data = self._group.data
        mine = [number for number, owned in enumerate(self.parameters) if owned.data == data.rank]
        if not self._group.sharded or data.size == 1:
            return {number: runs[number] for number in mine}
        outgoing = self._by_owner(runs, [owned.data for owned in self.parameters], data.size)
        incoming = [[self.parameters[number].held[rank][1] for number in mine] for rank in range(data.size)]
        # A parameter's ranges are in the order of the ranks.
        pieces = zip(*all_to_all_pieces(data, outgoing, incoming, self._like), strict=True)
        return {number: torch.cat(of_parameter) for number, of_parameter in zip(mine, pieces, strict=True)}

    def _over_tp(self, shares: Mapping[int, Tensor]) -> dict[int, Tensor]:
        tp = self._group.tp
        outgoing = self._by_owner(list(shares.values()), [self.parameters[n].tp for n in shares], tp.size)
        mine = [number for number in shares if self.parameters[number].tp == tp.rank]
        incoming = [[self.parameters[number].run.local_elements for number in mine]] * tp.size
        found = all_to_all_pieces(tp, outgoing, incoming, self._like) if shares else []
        whole = {}
        for number, parts in zip(mine, zip(*found, strict=True), strict=True):
            run = self.parameters[number].run
            local = [part.view(run.local_shape) for part in parts]
            joined = local[0] if tp.size == 1 else torch.cat(local, dim=run.dim or 0)
            whole[number] = joined[_places_by_rank(run, joined.device).argsort()] if run.rows_by_rank else joined
        return whole

    def _back_over_tp(self, whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        tp, data = self._group.tp, self._group.data
        here = [number for number, owned in enumerate(self.parameters) if owned.data == data.rank]
        outgoing = list[list[Tensor]]()
        runs = {number: self.parameters[number].run for number in whole}
        whole = {
            number: tensor[_places_by_rank(runs[number], tensor.device)] if runs[number].rows_by_rank else tensor
            for number, tensor in whole.items()
        }
        for rank in range(tp.size):
            shares = (tensor.chunk(tp.size, dim=runs[number].dim or 0)[rank] for number, tensor in whole.items())
            outgoing.append([share.reshape(-1) for share in shares])
        of_rank = [[number for number in here if self.parameters[number].tp == rank] for rank in range(tp.size)]
        incoming = [[self.parameters[number].run.local_elements for number in numbers] for numbers in of_rank]
        found = all_to_all_pieces(tp, outgoing, incoming, self._like) if here else [[] for _ in of_rank]
        shares_here = {
            number: share
            for numbers, of_numbers in zip(of_rank, found, strict=True)
            for number, share in zip(numbers, of_numbers, strict=True)
        }
        return {number: shares_here[number] for number in here}

    def _back_over_data(self, shares: Mapping[int, Tensor]) -> list[Tensor]:
        data, parameters = self._group.data, self.parameters
        if data.size == 1:
            return [shares[number] for number in range(len(parameters))]
        outgoing = [
            [share.narrow(0, *parameters[number].held[rank]) for number, share in shares.items()]
            for rank in range(data.size)
        ]
        of_rank = [[n for n, owned in enumerate(parameters) if owned.data == rank] for rank in range(data.size)]
        incoming = [[parameters[number].held[data.rank][1] for number in numbers] for numbers in of_rank]
        found: dict[int, Tensor] = {}
        for numbers, of_numbers in zip(of_rank, all_to_all_pieces(data, outgoing, incoming, self._like), strict=True):
            found |= zip(numbers, of_numbers, strict=True)
        return [found[number] for number in range(len(parameters))]

    @staticmethod
    def _by_owner(tensors: Sequence[Tensor], owners: Sequence[int], size: int) -> list[list[Tensor]]:
        rows: list[list[Tensor]] = [[] for _ in range(size)]
        for tensor, owner in zip(tensors, owners, strict=True):
            rows[owner].append(tensor.reshape(-1))
        return rows


def _places_by_rank(run: ParameterRun, device: torch.device) -> Tensor:
    """Index of each row in the unsharded parameter, in the order of the ranks that hold them."""
    return torch.cat([torch.arange(rows.start, rows.stop, device=device) for rows in run.rows_by_rank])


class MuonRule:
    """Muon's update rule for masters with role hidden, AdamW for all others.

    Args:
        optim: Muon's options, and AdamW's settings.
        fused: fused parameters that consist of several matrices.
        weights_dtype: dtype of the model weights, used by precision=auto.
        kernels: implementation of GEMMs on CPUs.
    """

    def __init__(
        self,
        optim: OptimConfig,
        fused: FusedRows,
        weights_dtype: torch.dtype,
        kernels: Kernels = TORCH,
    ) -> None:
        self._kernels = kernels
        self._options: MuonOptions = optim.typed_options
        self._adamw = AdamWRule(optim)
        self._matrices = FusedMatrices(fused, self._options.qkv)
        asked = {MuonPrecision.bf16: torch.bfloat16, MuonPrecision.fp32: torch.float32}
        self._dtype = asked.get(self._options.precision, weights_dtype)
        self._known: dict[tuple[int, ...], WholeMatrices] = {}

    def __call__(self, updates: Sequence[MasterUpdate]) -> None:
        """See UpdateRule."""
        hidden = [update for update in updates if update.parameters.role is Role.hidden]
        self._adamw([update for update in updates if update.parameters.role is not Role.hidden])
        for together in by_group(hidden):
            self._update(together)

    def _update(self, updates: Sequence[MasterUpdate]) -> None:
        """Updates masters of one group."""
        directions = [self._direction(update) for update in updates]
        exchange = self._exchange([update.parameters for update in updates], directions[0])
        pairs = list(zip(updates, directions, strict=True))
        runs = [run.view_in(flat_e) for update, flat_e in pairs for run in update.parameters.runs]
        whole = exchange.gather(runs)
        names = {number: exchange.parameters[number].run.name for number in whole}
        del runs, directions
        steps = iter(exchange.scatter(self._orthogonalized(whole, names)))
        for update, _ in pairs:
            update.master.mul_(1.0 - update.lr * update.weight_decay)
            for run in update.parameters.runs:
                run.view_in(update.master).sub_(next(steps), alpha=update.lr)

    def _direction(self, update: MasterUpdate) -> Tensor:
        """The (Nesterov) momentum, in the dtype of the communication."""
        momentum_e, gradient_e, beta = update.state["momentum_buffer"], update.grad, self._options.momentum
        momentum_e.lerp_(gradient_e, 1.0 - beta)
        direction_e = gradient_e.lerp_(momentum_e, beta) if self._options.nesterov else momentum_e
        return direction_e.to(self._dtype)

    def _exchange(self, layouts: Sequence[MasterLayout], like: Tensor) -> WholeMatrices:
        key = tuple(map(id, layouts))
        if key not in self._known:
            self._known[key] = WholeMatrices(layouts, self._matrices, self._options.steps, like)
        return self._known[key]

    def _orthogonalized(self, whole: Mapping[int, Tensor], names: Mapping[int, str]) -> dict[int, Tensor]:
        """The scaled updates of whole parameters; matrices of the same shape are batched."""
        parts = {number: self._matrices.split(names[number], tensor) for number, tensor in whole.items()}
        by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, matrices in parts.items():
            for place, matrix in enumerate(matrices):
                by_shape.setdefault(tuple(matrix.shape), []).append((number, place))
        for shape, places in by_shape.items():
            together = max(1, MUON_BATCH_ELEMENTS // math.prod(shape))
            for start in range(0, len(places), together):
                batch = places[start : start + together]
                stacked_krc = torch.stack([parts[number][place] for number, place in batch])
                made_krc = newton_schulz(stacked_krc, self._options.steps, self._kernels)
                made_krc = made_krc * (RMS * math.sqrt(max(shape)))
                for (number, place), made_rc in zip(batch, made_krc, strict=True):
                    parts[number][place] = made_rc
        return {number: self._matrices.join(names[number], matrices) for number, matrices in parts.items()}
