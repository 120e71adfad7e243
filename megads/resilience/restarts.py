"""Decides what follows a failed attempt: a pure function of the attempts so far and of the available nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megads.errors import EXIT_BUG, RankKilled, RestartsExhausted, UnhealthyNode

_FAULTS = (EXIT_BUG, UnhealthyNode.exit_code, RankKilled.exit_code)
"""Exit codes after which a restart may help: an unexpected error in a rank, an unhealthy node, a killed rank. Any other
code is final: a restart would end with it again, or is not wanted."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_PATIENCE = 4.0


@dataclass(frozen=True)
class Attempt:
    """One finished start of the ranks.

    Attributes:
        nodes: nodes of the ranks, in rank order.
        exit_code: documented exit code of the attempt.
        blamed: subset of `nodes`: the lost or faulty ones, or those of the rank that failed.
        lost: whether the blamed nodes themselves failed, not only a rank on them.
        rejected: nodes that have failed or not answered a health check so far, with the reason.
        stopping: whether the run had been asked to stop before it ended.
        from_step: step of the newest checkpoint at the start; 0 if none.
        saved_step: step of the newest checkpoint at the end.
        last_step: last recorded step at the end.
        failure: error in the run's own code; empty for a kill from outside, a hang or a lost node.
        hung: whether the attempt was ended because of a hang.
    """

    nodes: tuple[str, ...]
    exit_code: int
    blamed: tuple[str, ...] = ()
    lost: bool = False
    rejected: Mapping[str, str] = field(default_factory=dict)
    stopping: bool = False
    from_step: int = 0
    saved_step: int = 0
    last_step: int = 0
    failure: str = ""
    hung: bool = False


@dataclass(frozen=True)
class RestartMeans:
    """Resources for further attempts.

    Attributes:
        nodes: all nodes of the allocation, spares included, in allocation order.
        needed: number of nodes that the layout needs.
        max_restarts: largest number of consecutive restarts without a new checkpoint and without a requeue.
        queue: whether the job can be requeued.
    """

    nodes: tuple[str, ...]
    needed: int
    max_restarts: int
    queue: bool = False


@dataclass(frozen=True)
class Restart:
    """Decision to restart the ranks.

    Attributes:
        nodes: nodes of the ranks, in rank order.
        excluded: nodes that are no longer used.
        wait_s: delay before the restart, in seconds.
        patience: factor on the time after which ranks count as hung.
    """

    nodes: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    wait_s: float = 0.0
    patience: float = 1.0


@dataclass(frozen=True)
class Requeue:
    """Decision to requeue the job for other nodes.

    Attributes:
        excluded: nodes that the job asks not to get again.
    """

    excluded: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """Decision to end the run.

    Attributes:
        exit_code: exit code of the run.
        reason: readable reason why there is no further attempt; empty if the exit code implies it.
    """

    exit_code: int
    reason: str = ""


def next_attempt(history: Sequence[Attempt], means: RestartMeans) -> Restart | Requeue | GiveUp:
    """Decides what follows the last attempt.

    A run ends if its exit code is final, if it was asked to stop, or if its own code fails in the same way at the same
    step as before. Lost and rejected nodes are excluded, and a node on which a rank failed twice in a row if there is a
    spare. The other nodes keep their ranks, and spares take the free places. If too few nodes are left, the job is
    requeued and asks not to get the excluded nodes again. A second consecutive restart waits a few seconds, each
    further one twice as long.

    Args:
        history: all attempts of this job, oldest first.
        means: resources for further attempts.
    """
    last = history[-1]
    if last.exit_code not in _FAULTS or last.stopping:
        return GiveUp(last.exit_code)
    excluded = _excluded(history, means)
    healthy = [name for name in means.nodes if name not in excluded]
    if len(healthy) < means.needed:
        return _too_few(healthy, excluded, means)
    if means.max_restarts == 0:
        return GiveUp(last.exit_code)
    # Where a node was just left out, the cause may be gone with it.
    unchanged = excluded == _excluded(history[:-1], means)
    if unchanged and (same := _same_failure(history)):
        return GiveUp(last.exit_code, same)
    fruitless = _fruitless_restarts(history)
    if fruitless >= means.max_restarts:
        why = f"{fruitless} restarts without a new checkpoint in between were all that cluster.max_restarts allows"
        return GiveUp(RestartsExhausted.exit_code, why)
    wait_s = min(_LONGEST_WAIT_S, _SHORTEST_WAIT_S * 2 ** (fruitless - 1)) if fruitless and unchanged else 0.0
    # What looked like a hang may have been a long phase: then it would be one at every start.
    hangs = sum(attempt.hung for attempt in history[-fruitless - 1 :])
    places = assign_nodes(last.nodes, healthy, means.needed)
    return Restart(places, excluded, wait_s, _PATIENCE**hangs)


def _same_failure(history: Sequence[Attempt]) -> str:
    """Returns why a restart would fail in the same way; empty if it may succeed."""
    before, last = [history[0], *history][-2:]
    same = (last.failure, last.last_step) == (before.failure, before.last_step)
    if len(history) < 2 or not last.failure or not same:
        return ""
    return f"it failed in the same way after the same step ({last.last_step}) as the start before: {last.failure}"


def first_attempt(places: Sequence[str], rejected: Collection[str], means: RestartMeans) -> Restart | Requeue | GiveUp:
    """Decides on which nodes the ranks start after a health check.

    Args:
        places: planned nodes of the ranks, in rank order.
        rejected: nodes that failed the health check.
        means: resources for the attempt.
    """
    healthy = [name for name in means.nodes if name not in rejected]
    if len(healthy) < means.needed:
        return _too_few(healthy, tuple(rejected), means)
    return Restart(assign_nodes(places, healthy, means.needed), tuple(rejected))


def _too_few(healthy: Sequence[str], excluded: tuple[str, ...], means: RestartMeans) -> Requeue | GiveUp:
    why = f"{len(healthy)} healthy nodes are left, {means.needed} are needed"
    return Requeue(excluded) if means.queue else GiveUp(UnhealthyNode.exit_code, why)


def assign_nodes(before: Sequence[str], healthy: Sequence[str], needed: int) -> tuple[str, ...]:
    """Returns the nodes of the next attempt in rank order: healthy nodes keep their places, others take the free ones.

    Args:
        before: nodes of the last attempt; fewer than `needed` if there was none.
        healthy: usable nodes, at least `needed`.
        needed: number of nodes to choose.
    """
    used, usable = set(before), set(healthy)
    spares = iter([name for name in healthy if name not in used])
    kept = [name if name in usable else "" for name in [*before, *[""] * needed][:needed]]
    return tuple(name or next(spares) for name in kept)


def _fruitless_restarts(history: Sequence[Attempt]) -> int:
    """Counts the last consecutive restarts without progress.

    A restart made progress if it committed a later step than it began from and than any earlier attempt saved: else a
    checkpoint that is found damaged at every start would be saved again without end.
    """
    count, furthest = 0, history[0].saved_step
    for attempt in history[1:]:
        count = 0 if attempt.saved_step > max(attempt.from_step, furthest) else count + 1
        furthest = max(furthest, attempt.saved_step)
    return count


def _excluded(history: Sequence[Attempt], means: RestartMeans) -> tuple[str, ...]:
    """Returns the nodes that are no longer used, in the order in which they failed."""
    found: dict[str, None] = {}
    for attempt in history:
        found |= dict.fromkeys(attempt.blamed if attempt.lost else ())
        found |= dict.fromkeys(attempt.rejected)
    spare = len(means.nodes) - len(found) - means.needed
    for name in _failed_twice(history):
        if name not in found and spare > 0:
            found[name] = None
            spare -= 1
    return tuple(found)


def _failed_twice(history: Sequence[Attempt]) -> Collection[str]:
    """Returns the nodes on which a rank failed in both of the last two attempts: software would fail on any node."""
    if len(history) < 2:
        return ()
    return [name for name in history[-1].blamed if name in history[-2].blamed]
