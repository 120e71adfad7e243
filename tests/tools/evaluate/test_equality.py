"""Answers to lm-eval's requests, against lm-eval's own transformers backend on the export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, processors

from megads.checkpoint.read import open_checkpoint
from megads.evaluate.config import WeightPrecision
from megads.model.config import ModelConfig, Position
from megads.parallel.grid import build_grid
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLayoutConfig
from megads.tools.evaluate.job import load_layout, load_unsharded_model
from megads.tools.generate import checkpoint_tokenizer
from tests.distributed import run_ranks
from tests.tools.convert.test_formats import BASE, GPT_LIKE, LLAMA_LIKE, MIXTURES, exported, hot_model, tokenizer
from tests.tools.convert.test_model_folder import imported

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance

from megads.tools.evaluate.harness import HarnessModel

__all__ = ["tokenizer"]

# Absolute, in nats.
TOLERANCE = 1e-5
LENGTH = 40
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "bloom-untied": {"num_heads": 12, "tie_embeddings": False},
    "llama": {**LLAMA_LIKE, "num_kv_heads": 2, "tie_embeddings": False},
    "mistral": {**LLAMA_LIKE, "window": 5, "num_kv_heads": 2, "bias": False},
    "gpt_neox": {**GPT_LIKE, "position": Position.rope},
    "gpt2": {**GPT_LIKE, "position": Position.learned},
    **MIXTURES,
}
PAIRS = [
    ("def attention_3(query", ", key)"),
    ("", "def"),
    ("def attention_1(query, key): return ", "softmax(query @ key)"),
    ("query, key " * 12, "key"),
    ("naïve 漢字 🚀", "\n"),
    ("a", "b"),
]
TEXTS = ["def attention_7(query, key)", "softmax(query @ key)  # naïve 漢字 🚀\n" * 4, "x", ""]
PROMPTS = [
    ("def attention_3(query", {"until": ["\n"], "max_gen_toks": 12}),
    ("return softmax(query @ key) and so on " * 5, {"until": ["\n"], "max_gen_toks": 12}),
    ("a", {"until": ["\n"], "max_gen_toks": 12}),
    ("def", {"until": ["q", "k"], "max_gen_toks": 7, "do_sample": False}),
]


class Said(NamedTuple):
    """Answers to all requests, in their order."""

    pairs: list[tuple[float, bool]]
    rolling: list[float]
    texts: list[str]


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(kind, {}, given, number, metadata=("some", number, 1))  # type: ignore[arg-type]
        for number, given in enumerate(arguments)
    ]


def ask(model: Any) -> Said:
    return Said(
        [(float(value), bool(greedy)) for value, greedy in model.loglikelihood(requests("loglikelihood", PAIRS))],
        [float(x) for x in model.loglikelihood_rolling(requests("loglikelihood_rolling", [(t,) for t in TEXTS if t]))],
        list(model.generate_until(requests("generate_until", PROMPTS))),
    )


def model_config(name: str) -> ModelConfig:
    return ModelConfig(**(BASE | {"max_seq_len": LENGTH} | MODELS[name]))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Any]:
    """Returns, by model name, the folder of its run and lm-eval's own answers for its export; each is made once."""
    from lm_eval.models.huggingface import HFLM

    made: dict[str, tuple[Path, Said]] = {}

    def of(name: str) -> tuple[Path, Said]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            export = exported(folder, tokenizer, hot_model(model_config(name)))
            made[name] = folder / "run", ask(HFLM(str(export), device="cpu", dtype="float32", batch_size=3))
        return made[name]

    yield of


def config_of(run: Path, **sizes: int) -> EvaluateConfig:
    layout = EvaluationLayoutConfig(**sizes)
    return EvaluateConfig(str(run), batch_size=2, device="cpu", precision=WeightPrecision.fp32, layout=layout)


def require_equal(ours: Said, theirs: Said) -> None:
    for (value, greedy), (wanted, wanted_greedy) in zip(ours.pairs, theirs.pairs, strict=True):
        assert abs(value - wanted) <= TOLERANCE, (ours.pairs, theirs.pairs)
        assert greedy == wanted_greedy
    for value, wanted in zip(ours.rolling, theirs.rolling, strict=True):
        # Sums of up to 600 nats, which lm-eval adds up in fp32.
        assert abs(value - wanted) <= max(TOLERANCE, 2e-7 * abs(wanted)), (ours.rolling, theirs.rolling)
    assert ours.texts == theirs.texts


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_export(name: str, theirs: Any) -> None:
    """Catches labels that are off by one, padding that is scored, a context cut on the wrong side, windows that score a
    token twice, a completion that continues after its end, and an answer that depends on the rest of the batch."""
    run, wanted = theirs(name)
    handle = open_checkpoint(run)
    ours = ask(HarnessModel(load_unsharded_model(config_of(run), handle), checkpoint_tokenizer(handle)))
    require_equal(ours, wanted)


def test_answers_of_an_imported_model_are_those_of_its_folder(tmp_path: Path) -> None:
    """Catches a model with a BOS of its own whose texts without context begin with the end-of-document token."""
    from lm_eval.models.huggingface import HFLM

    folder, run = imported(tmp_path)
    handle = open_checkpoint(run)
    ours = ask(HarnessModel(load_unsharded_model(config_of(run), handle), checkpoint_tokenizer(handle)))
    require_equal(ours, ask(HFLM(str(folder), device="cpu", dtype="float32", batch_size=3)))


def test_texts_begin_as_the_documents_of_the_training(tmp_path: Path) -> None:
    """Catches contexts and prompts of tasks without tokenizer.begin_of_document, of which a tokenizer that adds no BOS
    knows nothing, and texts that begin with it twice."""
    _, run = imported(tmp_path)
    handle = open_checkpoint(run)
    with_bos, scorer = checkpoint_tokenizer(handle), load_unsharded_model(config_of(run), handle)
    words = Tokenizer.from_str(with_bos.tokenizer.to_str())
    words.encode_special_tokens = with_bos.tokenizer.encode_special_tokens
    words.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore[assignment]
    begun = replace(with_bos, tokenizer=words, adds_special_tokens=False, begin_of_document_id=1, template_tokens={})
    ours, theirs = ask(HarnessModel(scorer, begun)), ask(HarnessModel(scorer, with_bos))
    assert (ours.pairs, ours.texts) == (theirs.pairs, theirs.texts)
    alone = HarnessModel(scorer, begun).loglikelihood(requests("loglikelihood", [("", text) for text in TEXTS[::2]]))
    assert ours.rolling[::2] == pytest.approx([value for value, _ in alone], rel=1e-6)


def ask_in_layout(runs: Sequence[Path], sizes: dict[str, int]) -> list[Said]:
    """Asks on one rank of a layout; only the first rank returns answers."""
    found = []
    for run in runs:
        config = config_of(run, **sizes)
        grid = build_grid(config.layout.parallel, dist.get_rank(), dist.get_world_size())
        handle = open_checkpoint(run, grid.control)
        scorer = load_layout(config, handle, grid, torch.device("cpu"))
        with scorer.served() as asks:
            found += [ask(HarnessModel(scorer, checkpoint_tokenizer(handle)))] if asks else []
    return found


@pytest.mark.quick("ep2 of dp2")
@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}], ids=["ep2 of dp2", "ep2 of cp2"])
def test_answers_of_divided_experts_are_the_same(sizes: dict[str, int], theirs: Any) -> None:
    """Catches experts of another rank, and ranks that exchange rows a different number of times as their requests
    differ, which would wait for each other forever."""
    run, wanted = theirs("qwen2_moe")
    first, second = run_ranks(ask_in_layout, 2, [run], sizes)
    assert second == []
    require_equal(first[0], wanted)


@pytest.mark.quick("tp")
@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp"])
def test_answers_are_the_same_in_every_layout(axis: str, theirs: Any) -> None:
    """Catches a softmax over a part of the vocabulary or its padding, a greedy token of the wrong rank,
    context-parallel chunks of a sample joined in the wrong order, and rows returned to another request."""
    runs, wanted = zip(*(theirs(name) for name in ("bloom", "llama", "gpt2", "qwen2_moe")), strict=True)
    first, second = run_ranks(ask_in_layout, 2, runs, {axis: 2})
    assert second == []
    for ours, export in zip(first, wanted, strict=True):
        require_equal(ours, export)
