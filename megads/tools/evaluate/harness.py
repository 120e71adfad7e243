"""Adapter of a model in any layout to lm-eval: converts text requests to rows of tokens, and scores to answers.

Texts are tokenized, truncated and scored as in lm-eval's own backend for transformers, so that a model has the same
results here and after an export. This module imports lm-eval, so only code that needs lm-eval may import it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from megads.api import (
    ConfigError,
    DataError,
    FoundTokenizer,
    Sampling,
    atomic_writer,
    parse_json,
    read_regular,
    tokenizing,
)
from megads.tools.evaluate.scoring import Scorer, TokenRow, rolling_rows

LONGEST_COMPLETION = 256
"""Default maximum length of a completion, as in lm-eval's own backends."""
_CHOICE_KEYS = {"do_sample", "temperature", "top_p", "top_k"}

Progress = Callable[[str, int, int], None]
"""Called with a description, the number of finished items, and the total."""


@dataclass
class AnswerCache:
    """Stored answers of a model by task, so that a finished task is not evaluated again.

    Attributes:
        folder: folder of the answers; None stores nothing.
        model: everything besides the request that determines an answer: the checkpoint and how it is computed.
        kept: tasks whose answers were found.
    """

    folder: Path | None = None
    model: str = ""
    kept: set[str] = field(default_factory=set)

    def digest(self, kind: str, requests: Sequence[Instance]) -> str:
        """Returns a hash of everything that the answers to requests depend on."""
        # The requests reflect the task's config, version, limit and few-shot examples.
        text = json.dumps([self.model, kind, [request.args for request in requests]], default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def known(self, task: str, kind: str, requests: Sequence[Instance]) -> list[Any] | None:
        """Returns the stored answers; None if there are none for the same requests."""
        if self.folder is None:
            return None
        try:
            known = parse_json(read_regular(self.folder / self._name(task, kind)))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(known, dict) or known.get("requests") != self.digest(kind, requests):
            return None
        self.kept.add(task)
        return [tuple(answer) if isinstance(answer, list) else answer for answer in known["answers"]]

    def keep(self, task: str, kind: str, requests: Sequence[Instance], answers: Sequence[Any]) -> None:
        """Stores the answers to all requests of a task."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_writer(self.folder / self._name(task, kind)) as file:
            content = {"task": task, "requests": self.digest(kind, requests), "answers": answers}
            file.write(json.dumps(content).encode())

    def _name(self, task: str, kind: str) -> str:
        return f"{hashlib.sha256(task.encode()).hexdigest()[:8]}_{kind}.json"


@dataclass(frozen=True)
class BatchShare:
    """A part of a task's batches. The batches do not depend on the split, so answers are bitwise reproducible.

    Attributes:
        part: index of the part, from 0.
        parts: number of parts of the task.
    """

    part: int
    parts: int

    def select(self, batches: Sequence[list[int]], costs: Sequence[int]) -> list[list[int]]:
        """Returns consecutive batches of this part, whose costs sum to about an equal share of the total.

        Args:
            batches: batches of the whole task.
            costs: cost of each batch, such as its tokens.
        """
        total, before, own = sum(costs), 0, []
        for batch, cost in zip(batches, costs, strict=True):
            # Every batch belongs to the part that contains its midpoint.
            if self.parts * (2 * before + cost) // (2 * total) == self.part:
                own.append(batch)
            before += cost
        return own


def join_parts(kind: str, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins the results of `HarnessModel.answer_share` for every part of a task to the answers to all requests of a
    kind.

    Raises:
        ValueError: a part is missing.
    """

    def first(values: Sequence[Any]) -> Any:
        found = next((value for value in values if value is not None), None)
        if found is None:
            raise ValueError("no part has an answer")
        return tuple(found) if isinstance(found, list) else found

    if kind == "loglikelihood_rolling":
        return [sum(first(window) for window in zip(*windows, strict=True)) for windows in zip(*parts, strict=True)]
    return [first(values) for values in zip(*parts, strict=True)]


class HarnessModel(TemplateLM):
    """The model interface that lm-eval calls.

    Args:
        scorer: scores rows of tokens.
        found: the model's tokenizer.
        answers: answers of tasks that were finished before.
        progress: reports progress.

    Attributes:
        answers: stored answers.
    """

    def __init__(
        self,
        scorer: Scorer,
        found: FoundTokenizer,
        answers: AnswerCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self._scorer, self._found = scorer, found
        self.answers = answers or AnswerCache()
        self._progress = progress or (lambda _what, _done, _of: None)
        self._task, self._share = "", BatchShare(0, 1)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""
        return self._scorer.batching.max_length

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token, with which a text without context begins."""
        end = self._found.end_of_document_id
        if end is None:
            raise DataError(
                f"task {self._task}: has texts without context, and {self._found.path} has no end-of-document token "
                "to begin them with"
            )
        return end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: bos_token, as in lm-eval's own backend, or end of document."""
        first = self._found.first_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: Any) -> list[int]:
        """Tokenizes a text; unless told otherwise, with the tokenizer's special tokens at either end, and with the one
        that began documents in training."""
        first = self._found.first_token_id
        if add_special_tokens is None and first is not None and string.startswith(self._decode([first], special=True)):
            add_special_tokens = False
        with tokenizing(self._found.path):
            ids: list[int] = self._found.tokenizer.encode(
                string, add_special_tokens=add_special_tokens is not False
            ).ids
        return ids if add_special_tokens is False else self._found.begun(ids)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See lm_eval.api.model.LM."""
        return self._by_task("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """See lm_eval.api.model.LM."""
        return self._by_task("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """See lm_eval.api.model.LM."""
        return self._by_task("generate_until", requests)

    def _by_task(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Answers requests of any tasks: by stored answers if the requests of a task are the same."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(str(request.task_name), []).append(place)
        found: dict[int, Any] = {}
        for task, own in places.items():
            some = [requests[place] for place in own]
            answers = self.answers.known(task, kind, some)
            if answers is None:
                answers = join_parts(kind, [self.answer_share(task, kind, some, BatchShare(0, 1))])
                self.answers.keep(task, kind, some, answers)
            found |= zip(own, answers, strict=True)
        return [found[place] for place in range(len(requests))]

    def answer_share(self, task: str, kind: str, requests: list[Instance], share: BatchShare) -> list[Any]:
        """Answers the requests of a task that are in some of its batches.

        Args:
            task: name of the task.
            kind: kind of the requests.
            requests: all requests of this kind in the task.
            share: the batches.

        Returns:
            Input for `join_parts`: the answer to each request, None if it is not in the share; for
            loglikelihood_rolling a list with the answers of its windows.
        """
        self._task, self._share = task, share
        if kind == "generate_until":
            return self._generate(requests)
        if kind == "loglikelihood":
            empty = next((request for request in requests if not request.args[1]), None)
            if empty is not None:
                raise DataError(f"task {task}: document {empty.doc_id} has an empty answer, which has no likelihood")
            # It calls _loglikelihood_tokens.
            return list(super().loglikelihood(requests, True))
        rows, counts = list[TokenRow](), list[int]()
        for request in requests:
            # Texts of imported models have bos_token twice, as in lm-eval's own backend.
            begins = None if self._found.begin_of_document_id is None else False
            ids = self.tok_encode(request.args[0], begins)
            windows = rolling_rows(ids, self.prefix_token_id, self.max_length)
            counts.append(len(windows))
            rows += windows
        scores = iter(self._score(f"{task}, windows", rows))
        return [[None if one is None else one[0] for one in islice(scores, count)] for count in counts]

    def _score(self, what: str, rows: Sequence[TokenRow]) -> list[Any]:
        """Returns (log likelihood, whether it is the greedy continuation) of each row; None outside of the share."""
        batches = self._scorer.batches(rows)
        own = self._share.select(batches, [sum(len(rows[index].ids) for index in batch) for batch in batches])
        count = sum(map(len, own))
        found = self._scorer.score_batches(rows, own, lambda done: self._progress(what, done, count))
        answers: list[Any] = [None] * len(rows)
        for index, one in found.items():
            answers[index] = one.log_likelihood, one.likeliest == rows[index].ids[-rows[index].counted :]
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_options: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            if not context or not continuation or len(continuation) > self.max_length:
                raise DataError(
                    f"task {self._task}: {len(context)} tokens of context and {len(continuation)} of continuation: "
                    f"want at least one of each, and a continuation of at most {self.max_length}, which the model "
                    "reads (model.max_seq_len)"
                )
            # The last token is only scored, not read.
            rows.append(TokenRow([*context, *continuation][-(self.max_length + 1) :], len(continuation)))
        return self._score(f"{self._task}, requests", rows)

    def _generate(self, requests: Sequence[Instance]) -> list[Any]:
        """Returns a text for each request; None outside of the share."""
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(place)
        prompts: dict[int, list[int]] = {}
        batches: list[tuple[list[int], _GenerationSettings]] = []
        size, end_id = self._scorer.batching.micro_batch_size, self._found.end_of_document_id
        end = None if end_id is None else self._decode([end_id], special=True)
        for places in groups.values():
            asked = _GenerationSettings.parse(requests[places[0]].args[1], self._task, end, self.max_length)
            prompts |= {place: self.tok_encode(requests[place].args[0])[-asked.longest_context :] for place in places}
            by_length = sorted(places, key=lambda place: len(prompts[place]), reverse=True)
            batches += [(by_length[start : start + size], asked) for start in range(0, len(by_length), size)]
        costs = [asked.max_new_tokens + max(len(prompts[place]) for place in batch) for batch, asked in batches]
        own = {batch[0] for batch in self._share.select([batch for batch, _ in batches], costs)}
        count = sum(len(batch) for batch, _ in batches if batch[0] in own)
        found: dict[int, str] = {}
        for batch, asked in batches:
            if batch[0] in own:
                texts = self._continue([prompts[place] or [self.prefix_token_id] for place in batch], batch, asked)
                found |= zip(batch, texts, strict=True)
                self._progress(f"{self._task}, texts", len(found), count)
        return [found.get(place) for place in range(len(requests))]

    def _continue(self, prompts: list[list[int]], numbers: Sequence[int], asked: _GenerationSettings) -> list[str]:
        """Continues a batch of prompts; a finished row leaves the batch."""
        continuation = self._scorer.continuation(asked.sampling, numbers)
        made: list[list[int]] = [[] for _ in prompts]
        rows, pieces = list(range(len(prompts))), prompts
        continuation.start(len(rows))
        for _ in range(asked.max_new_tokens):
            tokens = continuation.append(pieces)
            for row, token in zip(rows, tokens, strict=True):
                made[row].append(token)
            going = []
            for place, row in enumerate(rows):
                text = self._decode(made[row], special=True)
                if tokens[place] != self._found.end_of_document_id and not any(end in text for end in asked.until):
                    going.append(place)
            if not going:
                break
            if len(going) < len(rows):
                continuation.keep(going)
            rows, pieces = [rows[place] for place in going], [[tokens[place]] for place in going]
        texts = (self._decode(ids, special=False) for ids in made)
        return [postprocess_generated_text(text, asked.until, None) for text in texts]

    def _decode(self, ids: Sequence[int], *, special: bool) -> str:
        with tokenizing(self._found.path):
            text: str = self._found.tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text


@dataclass(frozen=True)
class _GenerationSettings:
    """Generation parameters of a task."""

    sampling: Sampling
    until: list[str]
    max_new_tokens: int
    longest_context: int

    @classmethod
    def parse(cls, given: dict[str, Any], task: str, end: str | None, max_length: int) -> _GenerationSettings:
        kwargs = dict(normalize_gen_kwargs(given, LONGEST_COMPLETION))
        until = [stop for stop in handle_stop_sequences(kwargs.pop("until", None), eos=end) if stop]
        longest = int(kwargs.pop("max_gen_toks"))
        others = kwargs.keys() - _CHOICE_KEYS
        if others:
            raise ConfigError(
                f"task {task}: generation_kwargs has {', '.join(sorted(others))}: known are until, max_gen_toks, "
                f"{', '.join(sorted(_CHOICE_KEYS))}"
            )
        if not 0 < longest < max_length:
            raise ConfigError(
                f"task {task}: max_gen_toks = {longest} tokens to generate, but the model reads {max_length} "
                "(model.max_seq_len): set a smaller one in the task's generation_kwargs"
            )
        temperature = float(kwargs.get("temperature") or 0.0)
        if kwargs.get("do_sample") and not temperature:
            temperature = 1.0
        sampling = Sampling(temperature, float(kwargs.get("top_p", 1.0)), int(kwargs.get("top_k", 0)))
        return cls(sampling, until, longest, max_length - longest)
