"""What follows a start of the ranks that failed: a pure function of the attempts so far and of the nodes at hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megads.errors import EXIT_BUG, RankKilled, RestartsExhausted, UnhealthyNode

_FAULTS = (EXIT_BUG, UnhealthyNode.exit_code, RankKilled.exit_code)
"""A rank that died without a reason of its own or was killed, and a node. Every other code is the run's own word:
another start would end with it too, or nobody wants one."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_PATIENCE = 4.0


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, over.

    Attributes:
        nodes: on which they were, in the order of their ranks.
        exit_code: of the attempt, as documented.
        blamed: of these nodes, those with the lost or faulty ones, or with the rank that failed.
        lost: whether the blamed nodes themselves failed, and not only a rank on them.
        rejected: nodes that health checks so far found faulty or got no answer from, with the reason.
        stopping: the run had been asked to stop before it ended.
        from_step: of the newest checkpoint when it started; 0 for none.
        saved_step: of the newest checkpoint when it was over.
        last_step: that was recorded when it was over.
        failure: what the run's own code failed with; empty for a kill from outside, a hang or a lost node.
        hung: it was ended because it took too long to do anything.
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
class Means:
    """What there is to go on with.

    Attributes:
        nodes: all of the allocation, spares included, in its order.
        needed: nodes that the layout takes.
        max_restarts: most restarts in a row without a new checkpoint, and without going back to the queue.
        queue: there is one to go back to.
    """

    nodes: tuple[str, ...]
    needed: int
    max_restarts: int
    queue: bool = False


@dataclass(frozen=True)
class Restart:
    """Start again.

    Attributes:
        nodes: on which, in the order of their ranks.
        excluded: nodes that are not used any more.
        wait_s: before it: what failed twice may need a while.
        patience: factor on how long ranks may take before they count as hung.
    """

    nodes: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    wait_s: float = 0.0
    patience: float = 1.0


@dataclass(frozen=True)
class Requeue:
    """Give the nodes back and ask for others.

    Attributes:
        excluded: nodes that are not wanted again.
    """

    excluded: tuple[str, ...]


@dataclass(frozen=True)
class GiveUp:
    """Nothing follows.

    Attributes:
        exit_code: of the run.
        reason: why there is no other start, for people; empty where the code says it.
    """

    exit_code: int
    reason: str = ""


def next_attempt(history: Sequence[Attempt], means: Means) -> Restart | Requeue | GiveUp:
    """Decides what follows the last attempt.

    A run that ended by its own word, or was asked to stop, ends; so does one that fails in its own code in the same
    way at the same step as before. Nodes that were lost or rejected are left out, and one on which a rank failed twice
    in a row where there is another. The others keep their places, and spares take those that are free. Where too few
    are left, the job goes back to the queue and asks not to get them again. A second restart in a row waits a few
    seconds, each further one twice as long.

    Args:
        history: all attempts of this job, the last one last.
        means: what there is to go on with.
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
    places = take_places(last.nodes, healthy, means.needed)
    return Restart(places, excluded, wait_s, _PATIENCE**hangs)


def _same_failure(history: Sequence[Attempt]) -> str:
    """Why another start would fail too; empty where it may not."""
    before, last = [history[0], *history][-2:]
    same = (last.failure, last.last_step) == (before.failure, before.last_step)
    if len(history) < 2 or not last.failure or not same:
        return ""
    return f"it failed in the same way after the same step ({last.last_step}) as the start before: {last.failure}"


def first_attempt(places: Sequence[str], rejected: Collection[str], means: Means) -> Restart | Requeue | GiveUp:
    """Decides where the ranks start when a health check went before.

    Args:
        places: nodes that the ranks would be on.
        rejected: nodes that are not fit to train.
        means: what there is to start with.
    """
    healthy = [name for name in means.nodes if name not in rejected]
    if len(healthy) < means.needed:
        return _too_few(healthy, tuple(rejected), means)
    return Restart(take_places(places, healthy, means.needed), tuple(rejected))


def _too_few(healthy: Sequence[str], excluded: tuple[str, ...], means: Means) -> Requeue | GiveUp:
    why = f"{len(healthy)} healthy nodes are left, {means.needed} are needed"
    return Requeue(excluded) if means.queue else GiveUp(UnhealthyNode.exit_code, why)


def take_places(before: Sequence[str], healthy: Sequence[str], needed: int) -> tuple[str, ...]:
    """Returns the nodes of the next attempt: healthy ones where they were, others in the places that are free.

    Args:
        before: nodes of the last attempt; fewer than needed where there was none.
        healthy: nodes that may be used, at least `needed`.
        needed: nodes to choose.
    """
    used, usable = set(before), set(healthy)
    spares = iter([name for name in healthy if name not in used])
    kept = [name if name in usable else "" for name in [*before, *[""] * needed][:needed]]
    return tuple(name or next(spares) for name in kept)


def _fruitless_restarts(history: Sequence[Attempt]) -> int:
    """Counts the last restarts that brought the run no further.

    One that committed a later step than it began from did, unless an earlier attempt had got there too: a checkpoint
    that is found damaged at every start would be saved again without end.
    """
    count, furthest = 0, history[0].saved_step
    for attempt in history[1:]:
        count = 0 if attempt.saved_step > max(attempt.from_step, furthest) else count + 1
        furthest = max(furthest, attempt.saved_step)
    return count


def _excluded(history: Sequence[Attempt], means: Means) -> tuple[str, ...]:
    """Nodes that are not used any more, in the order in which they failed."""
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
    """Nodes on which a rank failed in both of the last two attempts: software would fail anywhere."""
    if len(history) < 2:
        return ()
    return [name for name in history[-1].blamed if name in history[-2].blamed]
