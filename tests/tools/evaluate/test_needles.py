"""Needles in haystacks: what the haystacks hold, and how the real evaluation scores models that can and cannot look
far back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.batch import MicroBatch
from megads.checkpoint.read import open_checkpoint
from megads.data.indexed.sidecar import FoundTokenizer
from megads.errors import EXIT_OK, ConfigError, DataError
from megads.evaluate.config import WeightPrecision
from megads.parallel.token_scores import RowScores
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.evaluate.command import evaluate
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLayoutConfig, NeedleConfig
from megads.tools.evaluate.needles import FoundNeedle, Haystack, HaystackMaker, measure_needles
from megads.tools.evaluate.scoring import Batching, Scorer
from megads.tools.generate import checkpoint_tokenizer
from tests.command import StartCommand
from tests.small_run import hot_model, model_config, write_dataset, write_run

LENGTHS, DEPTHS = [400, 700], [0.0, 0.3, 0.5, 0.9, 1.0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory with a checkpoint and its tokenizer, which knows hardly any word of the haystacks."""
    folder = tmp_path_factory.mktemp("needles")
    prefix = write_dataset(folder / "data")
    run_dir = write_run(folder / "run", prefix, hot_model(model_config()))
    EventWriter(run_dir).write("start")
    return run_dir


@pytest.fixture(scope="module")
def found(run: Path) -> FoundTokenizer:
    return checkpoint_tokenizer(open_checkpoint(run))


def needles(**changes: Any) -> NeedleConfig:
    given: dict[str, Any] = {"lengths": LENGTHS, "depths": DEPTHS, "samples": 3, "distractors": 3}
    return NeedleConfig(**(given | changes))


def all_haystacks(config: NeedleConfig, found: FoundTokenizer) -> list[Haystack]:
    config.check()
    maker = HaystackMaker(config, found)
    return [one for length in config.lengths for n in range(config.samples) for one in maker.haystacks(length, n)]


def text_of(haystack: Haystack, found: FoundTokenizer, ids: Sequence[int] | None = None) -> str:
    return found.tokenizer.decode(list(haystack.prompt if ids is None else ids))


@pytest.mark.parametrize("decoys", [0, 3])
def test_the_needle_is_at_its_depth_and_its_number_nowhere_else(decoys: int, found: FoundTokenizer) -> None:
    """Catches a needle at another depth, an answer that occurs elsewhere in the text or in the question, a wrong answer
    that can be read without a decoy, a haystack that is truncated or too short, and one without its question."""
    config = needles(decoys=decoys)
    sentence = max(len(ids) for ids in HaystackMaker(config, found)._sentences)
    for one in all_haystacks(config, found):
        text = text_of(one, found)
        right, *wrong = one.numbers
        assert len(one.prompt) + len(one.answers[0]) == one.length
        assert one.prompt[0] == found.end_of_document_id
        assert text.count(f" The number of the {one.key} is {right}.") == 1
        assert text.count(right) == 1 and text.count(one.key) == 2
        assert [text.count(number) for number in wrong] == [1] * decoys + [0] * (3 - decoys)
        assert text.endswith(f" The number of the {one.key} is") and not text.endswith(f"{right}")
        assert text_of(one, found, one.prompt[one.needle :]).startswith(f" The number of the {one.key} is {right}.")
        # Depth is measured in text alone, without the needles and the question.
        question = text.rindex(" The number of the")
        around = text_of(one, found, one.prompt[1 : one.needle]), text[:question].partition(f"{right}.")[2]
        before, after = (
            len(found.tokenizer.encode(part.replace(f" The number of the {key}", "")).ids)
            for part, key in zip(around, (one.key, one.key), strict=True)
        )
        share = before / (before + after)
        slack = (sentence + decoys * 40) / (before + after)
        assert abs(share - one.depth) <= slack and abs(one.placed - one.depth) <= sentence / (before + after) + 0.01
        if one.depth in (0.0, 1.0):
            assert one.placed == one.depth
    assert len({tuple(one.answers[0]) for one in all_haystacks(config, found)}) > 4


def test_haystacks_depend_on_nothing_but_the_settings(found: FoundTokenizer) -> None:
    """Catches haystacks that change between processes, or with the other lengths and samples, and depths that differ in
    more than the place of the needle."""
    config = needles(decoys=1)
    first = all_haystacks(config, found)
    assert first == all_haystacks(config, found)
    assert [one for one in first if one.length == 700] == all_haystacks(replace(config, lengths=[700]), found)
    assert first != all_haystacks(replace(config, seed=7), found)
    of_one = [one for one in first if one.length == 700][: len(DEPTHS)]
    assert len({(one.key, one.numbers) for one in of_one}) == 1
    assert len({tuple(sorted(one.prompt)) for one in of_one}) == 1 and len({one.needle for one in of_one}) == 5


def test_the_text_may_be_the_users(tmp_path: Path, found: FoundTokenizer) -> None:
    """Catches the project's text in place of the user's, a number of the text that becomes the answer, and a key that
    the text has."""
    path, used = tmp_path / "own.txt", set(range(10, 100)) - {37, 38, 58, 59}
    path.write_text(". ".join(f"Line {number} of an amber anchor" for number in sorted(used)))
    config = needles(text=str(path), digits=2, distractors=1, question="Tell me of the {key}:")
    for one in all_haystacks(config, found):
        text = text_of(one, found)
        assert text.count("of an amber anchor") > 5
        assert "river" not in text and text.endswith(f" Tell me of the {one.key}:")
        assert set(map(int, one.numbers)).isdisjoint(used) and one.key != "amber anchor"


class InductionOracle:
    """Engine that continues a text as its longest repetition did, as an induction head would (Olsson et al. 2022),
    looking back a limited number of tokens.

    Args:
        reach: number of tokens that it sees before the one it predicts.
        vocabulary: number of tokens.
    """

    device = torch.device("cpu")

    def __init__(self, reach: int, vocabulary: int) -> None:
        self._reach, self._rest = reach, math.log(0.1 / vocabulary)
        self.lengths = set[int]()

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        raise NotImplementedError

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        likelihoods, likeliest = [], []
        for batch in micro_batches:
            assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
            self.lengths.add(batch.tokens_bs.shape[1])
            for tokens, labels, mask in zip(batch.tokens_bs, batch.labels_bs, batch.loss_mask_bs, strict=True):
                guesses = torch.full_like(labels, -1)
                for place in mask.nonzero()[:, 0].tolist():
                    guesses[place] = self._next(tokens[max(0, place + 1 - self._reach) : place + 1].tolist())
                likeliest.append(guesses)
                likelihoods.append(torch.where(guesses == labels, math.log(0.9), self._rest).double())
        return RowScores(torch.stack(likelihoods)[:num_rows], torch.stack(likeliest)[:num_rows])

    def _next(self, seen: list[int]) -> int:
        best, guess = 0, -1
        for end in range(1, len(seen)):
            same = 0
            while same < end and seen[end - 1 - same] == seen[-1 - same]:
                same += 1
            best, guess = max((best, guess), (same, seen[end]), key=lambda pair: pair[0])
        # A repetition of a few bytes says nothing about the key.
        return guess if best >= 8 else -1


def scored(config: NeedleConfig, found: FoundTokenizer, reach: int) -> tuple[dict[str, Any], InductionOracle]:
    """The real evaluation with an oracle that looks back `reach` tokens."""
    oracle = InductionOracle(reach, found.vocab_size)
    scorer = Scorer(oracle, model_config(), Batching(2, max(config.lengths)))
    seen: list[tuple[Haystack, FoundNeedle]] = []
    results = measure_needles(scorer, found, config, lambda *_: None, lambda *pair: seen.append(pair))
    assert len(seen) == len(config.lengths) * len(config.depths) * config.samples
    for haystack, scores in seen:
        # Where the oracle sees the whole needle it is right; the answer's last token is the furthest from it.
        behind = haystack.length - 1 - haystack.needle
        assert scores.exact_match == (scores.rank == 1) == (behind <= reach), (haystack.depth, behind, scores)
    return results, oracle


def test_the_grid_shows_how_far_a_model_looks_back(found: FoundTokenizer) -> None:
    """Catches a needle at another depth than its cell's, an answer that leaks into the end of the haystack, haystacks
    cut to fewer tokens, cells of another length, and a tie that counts as found."""
    config = needles(decoys=1)
    whole, oracle = scored(config, found, 10_000)
    assert oracle.lengths == {length - 1 for length in LENGTHS}
    assert [(cell["length"], cell["depth"]) for cell in whole["cells"]] == [(n, d) for n in LENGTHS for d in DEPTHS]
    assert all(cell["accuracy"] == cell["exact_match"] == cell["mean_rank"] == 1 for cell in whole["cells"])
    near, _ = scored(config, found, 260)
    by_place = {(cell["length"], cell["depth"]): cell for cell in near["cells"]}
    assert [by_place[700, depth]["accuracy"] for depth in DEPTHS] == [0, 0, 0, 1, 1]
    assert by_place[400, 0.0]["accuracy"] == 0 and by_place[400, 0.9]["accuracy"] == 1
    # Blind, all answers are equally likely: the last of the right and three wrong ones.
    assert by_place[700, 0.0]["mean_rank"] == 4 and by_place[700, 0.0]["exact_match"] == 0


def test_an_answer_that_leaks_is_seen(found: FoundTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests above would fail for haystacks with a defect: the needle once more at the end, a needle at
    the beginning whatever the depth, and a haystack without its beginning."""
    good = HaystackMaker.haystacks

    def leaking(self: HaystackMaker, length: int, sample: int) -> Any:
        for one in good(self, length, sample):
            fact = self._fact(one.key, one.answers[0])
            cut = one.prompt[: -len(fact) - 40] + fact + one.prompt[-40:]
            yield replace(one, prompt=cut)

    def at_the_beginning(self: HaystackMaker, length: int, sample: int) -> Any:
        first, *others = good(self, length, sample)
        yield from (first, *(replace(first, depth=one.depth, placed=one.placed, needle=one.needle) for one in others))

    def without_beginning(self: HaystackMaker, length: int, sample: int) -> Any:
        yield from (replace(one, prompt=one.prompt[150:]) for one in good(self, length, sample))

    for defect in (leaking, at_the_beginning, without_beginning):
        monkeypatch.setattr(HaystackMaker, "haystacks", defect)
        with pytest.raises(AssertionError):
            test_the_grid_shows_how_far_a_model_looks_back(found)
        with pytest.raises(AssertionError):
            test_the_needle_is_at_its_depth_and_its_number_nowhere_else(0, found)


def config_of(run: Path, **changes: Any) -> EvaluateConfig:
    given: dict[str, Any] = {
        "run": str(run), "device": "cpu", "precision": WeightPrecision.fp32, "seq_len": 200, "batch_size": 2,
        "needle": needles(lengths=[150, 200], depths=[0.0, 1.0], samples=2),
    }  # fmt: skip
    return EvaluateConfig(**(given | changes))


def test_the_command_writes_a_grid(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a file without settings, validation sets that were not asked for, and haystacks that are not recorded."""
    assert evaluate(config_of(run, log_samples=True)) == EXIT_OK
    folder = run / "evaluation" / "step_00000003"
    (path,), (samples,) = folder.glob("needles_*.json"), folder.glob("haystacks_*.jsonl")
    content = json.loads(path.read_text())
    assert content["settings"] == {"seq_len": 200} and content["step"] == 3
    grid = content["needles"]
    assert grid["seed"] == 1234 and len(grid["text_sha256"]) == 64 and len(grid["cells"]) == 4
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 8
    for line in lines:
        assert line["text"].count(line["numbers"][0]) == 1 and len(line["log_likelihoods"]) == 4
        wrong_first = sum(value >= line["log_likelihoods"][0] for value in line["log_likelihoods"][1:])
        assert line["rank"] == 1 + wrong_first
    assert not list(folder.glob("perplexity_*"))
    assert "needles found at depth" in capsys.readouterr().out
    *_, event = read_json_lines(run / "events.jsonl")
    mean = sum(cell["accuracy"] for cell in grid["cells"] if cell["length"] == 150) / 2
    assert event["results"]["needles of 150 tokens at 200 tokens/accuracy"] == mean
    assert event["files"] == [str(path)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_the_grid_is_the_same_in_every_layout(axis: str, run: Path, tmp_path: Path, megads: StartCommand) -> None:
    """Catches answers scored at the positions of a rank's own tokens, and settings that do not reach the ranks."""
    layout = EvaluationLayoutConfig()
    assert evaluate(config_of(run, output=str(tmp_path / "alone"), log_samples=True, layout=layout)) == EXIT_OK
    words = [
        "needle.lengths=[150,200]",
        "needle.depths=[0,1]",
        "needle.samples=2",
        "needle.distractors=3",
        "seq_len=200",
    ]
    more = f"device=cpu precision=fp32 batch_size=2 log_samples=true layout.{axis}=2 output={tmp_path}/two".split()
    ended = megads("evaluate", f"run={run}", *words, *more).end()
    assert ended.code == EXIT_OK, ended.err
    likelihoods = []
    for name in ("alone", "two"):
        (path,) = (tmp_path / name).glob("haystacks_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        likelihoods.append([value for line in lines for value in line["log_likelihoods"]])
    assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-5)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": [40]}, ConfigError, "needle.lengths has 40, but needles, question and answer have"),
    ({"lengths": [300]}, ConfigError, "needle.lengths has 300, but the model reads 200 tokens"),
    ({"depths": [0.5, 1.5]}, ConfigError, "needle.depths = .*from 0 to 1"),
    ({"lengths": [150, 150]}, ConfigError, "give every value once"),
    ({"decoys": 4}, ConfigError, "needle.decoys = 4 exceeds"),
    ({"distractors": 0}, ConfigError, "needle.distractors = 0: must be at least 1"),
    ({"digits": 1, "distractors": 30}, ConfigError, "there are only"),
    ({"statement": "The {number} of {key}"}, ConfigError, "needle.statement"),
    ({"question": "Which?"}, ConfigError, "needle.question"),
    ({"text": "nowhere.txt"}, DataError, "needle.text = nowhere.txt: there is no such file"),
]


@pytest.mark.parametrize(("changes", "kind", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_evaluated_is_refused(
    changes: dict[str, Any], kind: type[Exception], said: str, run: Path
) -> None:
    """Catches a traceback, a truncated haystack, and settings without effect."""
    with pytest.raises(kind, match=said):
        evaluate(config_of(run, needle=needles(**({"lengths": [150]} | changes))))
