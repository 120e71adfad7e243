"""The mixes of datasets that a run has had.

Which dataset gives which sample is a function of the sample's number, so a mix that is changed in the middle of a run
would count from its beginning: samples would be trained twice, and others never. A change therefore counts from the
sample at which it is made. The mixes before it stay in data.history, and every dataset goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from megads.data.blend_config import MixConfig
from megads.data.config import DataConfig
from megads.errors import ConfigError


def mixes(data: DataConfig, weights: Sequence[float]) -> list[MixConfig]:
    """All mixes of a run, past and planned, in order; the first one starts at sample 0.

    Args:
        data: what the run reads.
        weights: of data.train, see `megads.data.datasets.blend_weights`.
    """
    paths = [item.path for item in data.train]
    past = list(data.history) or [MixConfig(0, dict(zip(paths, weights, strict=True)))]
    phases = [MixConfig(phase.from_sample, dict(zip(paths, phase.weights, strict=True))) for phase in data.phases]
    return past + [mix for mix in phases if mix.from_sample > past[-1].from_sample]


def continued(
    now: DataConfig,
    before: DataConfig,
    samples: int,
    weigh: Callable[[DataConfig], Sequence[float]],
    renamed: Mapping[str, str],
) -> DataConfig:
    """Returns `now` with the mixes that the run had before; the same as before where nothing else is asked for.

    Args:
        now: what the user asks for.
        before: of the start whose checkpoint the run goes on from.
        samples: consumed by then, ranges of data.skip included.
        weigh: returns the weights of data.train.
        renamed: new paths of datasets by their old ones.

    Raises:
        ConfigError: the mix changes, and a dataset is there twice.
    """
    if _asked(now) == _asked(before):
        return replace(now, history=list(before.history))
    if samples == 0:
        return now
    paths = [item.path for item in now.train]
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise ConfigError(
            f"data.train names {twice[0]} twice, in a mix that changes at sample {samples}: nobody could tell which of "
            "the two goes on; name it once, with the sum of the weights"
        )
    past = [
        MixConfig(mix.from_sample, {renamed.get(path, path): weight for path, weight in mix.weights.items()})
        for mix in mixes(before, weigh(before))
        if mix.from_sample < samples
    ]
    current = [mix for mix in mixes(now, weigh(now)) if mix.from_sample <= samples][-1]
    if _shares(current) != _shares(past[-1]):
        past.append(MixConfig(samples, dict(current.weights)))
    return replace(now, history=past)


def _asked(data: DataConfig) -> tuple[object, ...]:
    """What of a config decides on the mix."""
    train = [(item.path, item.weight) for item in data.train]
    return train, data.weights, data.temperature, [(phase.from_sample, phase.weights) for phase in data.phases]


def _shares(mix: MixConfig) -> dict[str, Fraction]:
    total = sum(map(Fraction, mix.weights.values()))
    return {path: Fraction(weight) / total for path, weight in mix.weights.items() if weight}
