"""Which data settings are accepted and refused, at their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megads.data.config import (
    DataConfig,
    DataPhaseConfig,
    DatasetConfig,
    MixConfig,
    Order,
    PackingMode,
    SkipConfig,
    TextSpecialTokens,
    Weighting,
)
from megads.data.tokenizer_config import TextTokenizerConfig, check_tokenizer_training
from megads.errors import ConfigError
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.preprocess import document_fields


def blend(*weights: float | None, **more: Any) -> dict[str, Any]:
    """Returns one dataset for each weight, named a, b, and so on."""
    return {
        "train": [DatasetConfig(f"data/{name}", weight) for name, weight in zip("abc", weights, strict=False)]
    } | more


def phases(*weights: list[float], begin: int = 1) -> list[DataPhaseConfig]:
    return [DataPhaseConfig(begin + place, each) for place, each in enumerate(weights)]


BEST_FIT = {"packing": PackingMode.best_fit, "document_mask": True, "reset_positions": True}


@pytest.mark.parametrize(
    "settings",
    [
        blend(None),
        {"raw": "my.txt"},
        {"raw": ["a.txt", "b"]},
        blend(None, split=[1.0, 0.0]),
        blend(None, split=[0.5, 3]),
        blend(None, prefetch_steps=1),
        blend(1e-9, 5.0),
        blend(None, None, weights=Weighting.tokens),
        blend(None, temperature=1e-9, megatron_theta=1.0),
        {"train": [DatasetConfig("a", max_epochs=0.5)]},
        blend(1, 1, phases=phases([0, 1], [1, 0])),
        blend(None, valid="held-out"),
        blend(None, valid={"a.b-c_1": "held-out"}),
        blend(None, skip=[SkipConfig(steps=[1, 1]), SkipConfig(samples=[0, 1])]),
        blend(None, **BEST_FIT),
        {"train": [DatasetConfig("x/a", 1), DatasetConfig("y/a", 1)], "split": [1, 0]},
        {"train": [DatasetConfig("x/a", 1), DatasetConfig("y/a", 1, name="b")]},
        {"train": [DatasetConfig("x/a", 1), DatasetConfig("y/a", 1)], "valid": "held-out"},
    ],
)
def test_valid_data_settings_pass(settings: dict[str, Any]) -> None:
    """Catches a check that refuses a value at its limit."""
    DataConfig(**settings).check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "data.train has 0 datasets"),
        ({"raw": []}, r"data.raw = \[\]"),
        ({"raw": ["a", ""]}, "want a file, folder or glob"),
        ({"raw": 3}, "data.raw = 3"),
        (blend(None, raw="a.txt"), "are both set"),
        (blend(None, split=[1.0]), "want two shares"),
        (blend(None, split=[1.0, 0, 0]), "want two shares"),
        (blend(None, split=[1.0, -0.1]), "train above 0"),
        (blend(None, split=[0.0, 1.0]), "train above 0"),
        (blend(None, prefetch_steps=0), "data.prefetch_steps = 0"),
        (blend(1.0, 0.0, order=Order.megatron), r"data.train\[1\] \(data/b\): weight = 0.0: every dataset"),
        (blend(1.0, -0.1), r"data.train\[1\] \(data/b\): weight = -0.1: every dataset"),
        (blend(0.0, 0.0), "every weight is 0"),
        (blend(1.0, None), "weight = None: every dataset"),
        (blend(1.0, math.inf), "weight = inf"),
        (blend(None, 1.0, weights=Weighting.tokens), r"data.train\[1\].*data.weights = tokens computes the weights"),
        (blend(None, temperature=0.0), "data.temperature = 0.0"),
        (blend(None, temperature=math.inf), "data.temperature = inf"),
        (blend(None, megatron_theta=0.0), "data.megatron_theta = 0.0"),
        (blend(None, megatron_theta=1.01), "data.megatron_theta = 1.01"),
        ({"train": [DatasetConfig("a", max_epochs=0.0)]}, "max_epochs = 0.0"),
        ({"train": [DatasetConfig("a", max_epochs=math.inf)]}, "max_epochs = inf"),
        ({"train": [DatasetConfig("a", max_epochs=-1.0)]}, "max_epochs = -1.0"),
        (blend(1, 1, phases=phases([1, 1], begin=0)), r"data.phases\[0\].from_sample = 0: must be above 0"),
        (
            blend(1, 1, phases=[DataPhaseConfig(5, [1, 1]), DataPhaseConfig(5, [1, 0])]),
            r"data.phases\[1\].from_sample = 5: must be above 5",
        ),
        (blend(1, 1, phases=phases([1])), r"weights = \[1\]: want 2"),
        (blend(1, 1, phases=phases([2, -1])), "none negative"),
        (blend(1, 1, phases=phases([0, 0])), "one above 0"),
        (blend(1, 1, phases=phases([1, math.inf])), "one above 0"),
        (blend(1, 1, phases=phases([1, 1]), order=Order.megatron), "Megatron's order has one mix"),
        (blend(None, valid=""), "want a prefix"),
        (blend(None, valid={}), "want a prefix"),
        (blend(None, valid=["held-out"]), "want a prefix"),
        (blend(None, valid={"a": 3}), "want a prefix"),
        (blend(None, valid={"a/b": "held-out"}), "the name 'a/b' may hold"),
        (blend(None, valid={"a": "held-out", "": "held-out"}), "the name '' may hold"),
        ({"train": [DatasetConfig("x/a", 1), DatasetConfig("y/a", 1)]}, "are not distinct"),
        (blend(None, **BEST_FIT | {"document_mask": False}), "set both to true"),
        (blend(None, **BEST_FIT | {"reset_positions": False}), "set both to true"),
        (blend(None, **BEST_FIT, order=Order.megatron), "Megatron's order cuts concatenated documents"),
        (blend(None, skip=[SkipConfig()]), "want one range of one kind"),
        (blend(None, skip=[SkipConfig(steps=[1, 2], samples=[1, 2])]), "want one range of one kind"),
        (blend(None, skip=[SkipConfig(steps=[1, 2, 3])]), "want one range of one kind"),
        (blend(None, skip=[SkipConfig(steps=[0, 1])]), "1 <= first"),
        (blend(None, skip=[SkipConfig(steps=[3, 2])]), "1 <= first"),
        (blend(None, skip=[SkipConfig(samples=[-1, 2])]), "0 <= from < to"),
        (blend(None, skip=[SkipConfig(samples=[2, 2])]), "0 <= from < to"),
    ],
)
def test_invalid_data_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    """Catches a wrong setting that would fail, or train on something else, long after the start."""
    with pytest.raises(ConfigError, match=said):
        DataConfig(**settings).check()


def test_datasets_of_former_mixes_stay_open_while_they_have_samples() -> None:
    """Catches a dataset of a former blend that is not opened although the stream still has samples of it, one that is
    opened twice, and an epoch limit on a former one."""
    config = DataConfig(**blend(1, 1), history=[MixConfig(0, {"data/old": 1, "data/b": 1})], valid="data/a")
    assert [item.path for item in config.blended] == ["data/old", "data/b", "data/a"]
    assert config.blended[0].max_epochs == 1e9 and config.blended[1].max_epochs is None
    assert config.paths == ["data/old", "data/b", "data/a"]
    assert DataConfig(**blend(1, 1), valid={"x": "held/x"}).paths == ["data/a", "data/b", "held/x"]
    assert config.valid_paths == {"held_out": "data/a"} and DataConfig(**blend(1)).valid_paths == {}
    assert DataConfig(raw="a").raw_patterns == ["a"] and DataConfig(raw=["a", "b"]).raw_patterns == ["a", "b"]
    assert DataConfig().raw_patterns == []


def test_vocabulary_sizes_are_checked_before_reading_text() -> None:
    """Catches a vocabulary without room for the bytes, or too large for memory, found only after reading the text."""
    for size, pairs in ((257, 1), (1 << 24, 2), (None, 1)):
        check_tokenizer_training("tokenizer.", size, pairs)
    for size, pairs, said in (
        (256, 1, "tokenizer.vocab_size = 256: must be at least 257"),
        ((1 << 24) + 1, 1, "tokenizer.vocab_size = 16777217: must be at most 16777216"),
        (None, 0, "tokenizer.min_frequency = 0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_tokenizer_training("tokenizer.", size, pairs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"path": "t.json"}, None),
        ({"vocab_size": 300, "end_of_document": None}, None),
        ({"path": "t.json", "vocab_size": 300}, "leave one of them out"),
        ({"vocab_size": 3}, "tokenizer.vocab_size = 3"),
        ({"end_of_document": ""}, "tokenizer.end_of_document is empty"),
        ({"begin_of_document": ""}, "tokenizer.begin_of_document is empty"),
        ({"begin_of_document": "<s>"}, r"a tokenizer trained on data.raw has only the special token <\|endoftext\|>"),
    ],
)
def test_a_tokenizer_is_either_given_or_trained(settings: dict[str, Any], said: str | None) -> None:
    """Catches a tokenizer that is both given and to be trained."""
    if said is None:
        TextTokenizerConfig(**settings).check()
        return
    with pytest.raises(ConfigError, match=said):
        TextTokenizerConfig(**settings).check()


def test_preprocess_fields_and_inputs_are_checked() -> None:
    """Catches half a prompt-response pair, zero workers, and files combined with standard input."""
    pair = PreprocessConfig(prompt_field="q", response_field="a", workers=1, input=["-"])
    pair.check()
    ignored = None, None, TextSpecialTokens.ignore
    assert document_fields(pair, *ignored) == ("q", "a")
    assert document_fields(PreprocessConfig(text_field="t"), *ignored) == ("t",)
    for wrong in ({"messages_field": "m", "prompt_field": "q", "response_field": "a"}, {"chat_template": "t.jinja"}):
        with pytest.raises(ConfigError, match=r"leave one of them out|makes text of messages"):
            PreprocessConfig(**wrong).check()
    for wrong in ({"messages_field": "m"}, {"prompt_field": "q", "response_field": "a"}):
        with pytest.raises(ConfigError, match="the loss would include the prompts"):
            DataConfig(raw="x.jsonl", **wrong).check()
    for settings, said in (
        ({"prompt_field": "q"}, "a pair needs both"),
        ({"response_field": "a"}, "a pair needs both"),
        ({"workers": 0}, "workers = 0: must be at least 1"),
        ({"input": ["-", "a.txt"]}, "must stand alone"),
    ):
        with pytest.raises(ConfigError, match=said):
            PreprocessConfig(**settings).check()  # type: ignore[arg-type]
