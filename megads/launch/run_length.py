"""Length of a run whose config leaves it to the data: train.steps=auto and train.epochs."""

from __future__ import annotations

import dataclasses
from math import ceil, prod

from megads.config import RootConfig, batch_size_schedule, open_run_data
from megads.train_config import AUTO

PASSES = 4
"""Up to four passes, repeated text is almost as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""
TOKENS_PER_PARAMETER = 20
"""Beyond it, a larger model is the better use of compute (Hoffmann et al. 2022, arXiv:2203.15556)."""
LEAST_STEPS = 200
"""Fewer are too few for AdamW, warmup and decay, however small the text."""


def settle_length(config: RootConfig) -> tuple[RootConfig, str]:
    """Returns the config with its length in steps, and a line that explains it; empty if the length was given.

    Args:
        config: config of a run whose data is prepared and whose vocabulary size is known.

    Raises:
        ConfigError: the run uses more of a dataset than allowed.
        DataError: the data is missing or damaged.
    """
    # Imports torch, which would delay shell completion.
    from megads.plan.model_size import parameter_shapes

    train = config.train
    if train.length_is_known:
        return config, ""
    source, _ = open_run_data(dataclasses.replace(config, data=dataclasses.replace(config.data, stage_to=None)))
    samples, batches = source.samples_per_epoch, batch_size_schedule(config)
    tokens = samples * train.seq_len
    if train.epochs is not None:
        steps = max(1, batches.steps_for(ceil(train.epochs * samples)))
        told = f"train.epochs = {train.epochs:g}: {steps:,} steps over {tokens:,} tokens of text"
    else:
        shapes = parameter_shapes(config.model)
        parameters = sum(prod(shape) for name, shape in shapes.items() if name.startswith("blocks."))
        wanted, why = wanted_tokens(tokens, parameters)
        steps = batches.steps_for(ceil(wanted / train.seq_len))
        if steps < LEAST_STEPS:
            trained = batches.samples_after(LEAST_STEPS) * train.seq_len
            steps, why = LEAST_STEPS, f"the minimum, {trained / tokens:.1f} passes over {tokens:,} tokens of text"
        told = f"train.steps = {AUTO}: {steps:,} steps, {why}"
    return dataclasses.replace(config, train=dataclasses.replace(train, steps=steps, epochs=None)), told


def wanted_tokens(text: int, parameters: int) -> tuple[int, str]:
    """Returns the number of tokens to train on, and the reason.

    Args:
        text: number of tokens of the training data.
        parameters: number of parameters of the blocks, without the embedding, which learns from every token and has
            most of a small model's parameters.
    """
    passes, per_parameter = PASSES * text, TOKENS_PER_PARAMETER * parameters
    if passes <= per_parameter:
        return passes, f"{PASSES} passes over {text:,} tokens of text"
    enough = f"{TOKENS_PER_PARAMETER} tokens for each of the {parameters:,} parameters of the blocks"
    if per_parameter < text:
        return per_parameter, f"{enough}; the text has {text:,} tokens, enough for a larger model"
    return per_parameter, enough
