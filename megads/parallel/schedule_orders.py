"""Orders of forward and backward passes with stages in a row: 1F1B, interleaved, ZB-H1.

Letters: p pipeline ranks, v virtual stages a rank, m micro-batches. Idle time is counted in forward passes of a whole
rank, with a backward pass of two of them.
"""

from __future__ import annotations

from megads.parallel.pipeline_actions import Action, ActionKind


def one_forward_one_backward(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B (PipeDream-2BW's flush variant, Narayanan et al. 2021): rank r runs p - r - 1 forward passes ahead.

    At most p - r micro-batches wait on rank r; every rank is idle for 3 (p - 1).
    """
    rows = []
    for rank in range(pipeline_ranks):
        ahead = min(pipeline_ranks - rank - 1, micro_batches)
        row = [Action(ActionKind.forward, micro_batch, rank) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            if ahead + micro_batch < micro_batches:
                row.append(Action(ActionKind.forward, ahead + micro_batch, rank))
            row.append(Action(ActionKind.backward, micro_batch, rank))
        rows.append(row)
    return rows


def zero_bubble(pipeline_ranks: int, micro_batches: int) -> list[list[Action]]:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B whose backward passes come in two parts.

    Rank r runs the weight part r micro-batches late, and what is late fills the waits of the end. At most p
    micro-batches wait on every rank, as on 1F1B's first; every rank is idle for p - 1, a third of 1F1B's time, if
    m >= p.
    """
    rows = []
    for rank in range(pipeline_ranks):
        ahead, behind = min(pipeline_ranks - rank - 1, micro_batches), min(rank, micro_batches)
        row = [Action(ActionKind.forward, micro_batch, rank) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            if ahead + micro_batch < micro_batches:
                row.append(Action(ActionKind.forward, ahead + micro_batch, rank))
            row.append(Action(ActionKind.backward_input, micro_batch, rank))
            if micro_batch >= behind:
                row.append(Action(ActionKind.backward_weight, micro_batch - behind, rank))
        late = range(micro_batches - behind, micro_batches)
        rows.append([*row, *(Action(ActionKind.backward_weight, micro_batch, rank) for micro_batch in late)])
    return rows


def interleaved(pipeline_ranks: int, virtual_stages: int, micro_batches: int, contiguous: int) -> list[list[Action]]:
    """Interleaved 1F1B (Narayanan et al. 2021) with any number of micro-batches (Llama 3, section 3.3.2).

    A group of micro-batches goes through a rank's first virtual stage, then through its second, and so on. Groups have
    `contiguous` micro-batches or more: what does not fill a group of its own is spread over the others, so that no
    group is smaller than the pipeline is long and every rank is idle for 3 (p - 1) / v whatever m >= p is.

    Rank r runs 2 (p - r - 1) + (v - 1) * group passes ahead, Megatron's number: one p - r - 1 would do were messages
    free; the second hides them, since what is received was sent a whole pass before it is used.

    Args:
        pipeline_ranks: p.
        virtual_stages: v.
        micro_batches: m.
        contiguous: least micro-batches of a group, at least p: p is depth-first, m breadth-first.
    """
    assert contiguous >= pipeline_ranks, (contiguous, pipeline_ranks)
    groups = _groups(micro_batches, contiguous)
    turns = range(virtual_stages)
    forwards = [(micro_batch, turn) for group in groups for turn in turns for micro_batch in group]
    backwards = [(micro_batch, turn) for group in groups for turn in reversed(turns) for micro_batch in group]
    rows = []
    for rank in range(pipeline_ranks):
        ahead = min(2 * (pipeline_ranks - rank - 1) + (virtual_stages - 1) * len(groups[0]), len(forwards))
        forward = [Action(ActionKind.forward, mb, turn * pipeline_ranks + rank) for mb, turn in forwards]
        backward = [Action(ActionKind.backward, mb, turn * pipeline_ranks + rank) for mb, turn in backwards]
        row = forward[:ahead]
        for index, action in enumerate(backward):
            row += [*forward[ahead + index : ahead + index + 1], action]
        rows.append(row)
    return rows


def _groups(micro_batches: int, contiguous: int) -> list[range]:
    """Micro-batches in consecutive groups of at least `contiguous`, if there are so many, the largest first."""
    number = max(1, micro_batches // contiguous)
    size, larger = divmod(micro_batches, number)
    starts = [group * size + min(group, larger) for group in range(number + 1)]
    return [range(starts[group], starts[group + 1]) for group in range(number)]
