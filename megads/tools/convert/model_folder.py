"""The settings files of an exported folder: tokenizer, chat template, generation.

If the run started from an imported model, its files are written as they were, except for what training changed: the
tokens at which a text ends, and the chat template. Otherwise they are made from the run's tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megads.api import HUGGING_FACE_FOLDER, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, FoundTokenizer, named_tokens
from megads.data.indexed.run_tokenizer import (
    GENERATION_FILE,
    MODEL_CONFIG_FILE,
    TOKENIZER_SETTINGS,
    hugging_face_settings,
    token_ids,
)
from megads.data.indexed.sidecar import SPECIAL_TOKENS_FILE, TEMPLATE_FILE, TOKEN_NAMES, own_template
from megads.tools.generate import chat_template_of
from megads.tools.prepare.chat import special_tokens

_PADDING = ("pad", "padding", "pad_token", "finetune_right_pad_id")
"""Names of padding tokens without brackets; others, such as <|image_pad|>, stand for something else."""


class ModelFolder:
    """The settings files of an export.

    Args:
        run_dir: run directory, with the files of the imported model in `hugging_face/`, if any.
        tokenizer: tokenizer of the run.

    Raises:
        ConfigError: a file of the imported model cannot be read.
    """

    def __init__(self, run_dir: Path, tokenizer: FoundTokenizer) -> None:
        self._kept = run_dir / HUGGING_FACE_FOLDER
        self._config = hugging_face_settings(run_dir, MODEL_CONFIG_FILE)
        self._generation = hugging_face_settings(run_dir, GENERATION_FILE)
        self._tokenizer = tokenizer
        self._words = tokenizer.tokenizer
        self._template = own_template(tokenizer.path)
        self._names = named_tokens(run_dir / TOKENIZER_FILE)
        self._turn_end: str | None = None
        if self._template is not None:
            self._turn_end = chat_template_of(tokenizer, self._template).end_of_answer(self._words)
        self._tokens = self._named_tokens()

    def _named_tokens(self) -> dict[str, str]:
        """Returns the special tokens by the names of tokenizer_config.json."""
        template = self._template or ""
        # What the template wrote in training counts, even if the imported model names another token.
        rendered = {name: token for name, token in self._tokenizer.template_tokens.items() if token}
        tokens = self._names | rendered
        if not self._names:
            ids = {"eos_token": self._tokenizer.end_of_document_id}
            ids |= {name: id_ for name in TOKEN_NAMES if isinstance(id_ := self._config.get(f"{name}_id"), int)}
            found = {name: self._words.id_to_token(id_) for name, id_ in ids.items() if id_ is not None}
            tokens = {name: token for name, token in found.items() if token} | rendered
            # A document begins after the end of another, as in GPT-2. Other engines want a token for each name.
            for name in ("bos_token", "unk_token") if "eos_token" in tokens and "bos_token" not in template else ():
                tokens.setdefault(name, tokens["eos_token"])
        # Engines that know one end only take the tokenizer's.
        if self._turn_end is not None and "eos_token" not in template:
            tokens["eos_token"] = self._turn_end
        # Not a new token, which would need a row of the embedding.
        padding = [token for token in special_tokens(self._words) if token.strip("<|>[]").lower() in _PADDING]
        padding += [tokens["eos_token"]] if "eos_token" in tokens else []
        return tokens if not padding else {"pad_token": padding[0], **tokens}

    def _id_of(self, name: str) -> int | None:
        found: int | None = self._words.token_to_id(self._tokens[name]) if name in self._tokens else None
        return found

    def token_ids(self) -> dict[str, Any]:
        """Returns the special tokens of config.json, all explicit, because transformers' defaults are other tokens."""
        return {
            "bos_token_id": self._config.get("bos_token_id") if self._config else self._id_of("bos_token"),
            "eos_token_id": self._ends(self._config.get("eos_token_id")),
            # The embedding of this token is not trained by transformers: none unless the imported model has one.
            "pad_token_id": self._config.get("pad_token_id"),
        }

    def generation_config(self) -> dict[str, Any]:
        """Returns the content of generation_config.json."""
        content = self._generation or {**self.token_ids(), **({} if self._config else {"do_sample": True})}
        ends = self._ends(content.get("eos_token_id", self._config.get("eos_token_id")))
        content |= {"eos_token_id": ends}
        if content.get("pad_token_id") is None:
            content |= {"pad_token_id": self._id_of("pad_token")}
        return content

    def _ends(self, imported: Any) -> Any:
        """Returns the tokens at which a text ends: an id, a list of several, or None.

        Args:
            imported: those of the imported model, which stay as they are if training added none.
        """
        turn_end = None if self._turn_end is None else self._words.token_to_id(self._turn_end)
        ends = token_ids(imported)
        missing = [end for end in (self._tokenizer.end_of_document_id, turn_end) if end is not None and end not in ends]
        if not missing:
            return imported
        ends += dict.fromkeys(missing)
        return ends if len(ends) > 1 else ends[0]

    def write_tokenizer(self, folder: Path, max_length: int) -> None:
        """Writes the tokenizer, its settings and the chat template.

        Args:
            folder: the exported folder.
            max_length: number of tokens for which the model is made.
        """
        shutil.copyfile(self._tokenizer.path, folder / TOKENIZER_FILE)
        for name in TOKENIZER_SETTINGS:
            if (self._kept / name).is_file():
                shutil.copyfile(self._kept / name, folder / name)
        for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
            if not (folder / name).is_file():
                continue
            content = json.loads((folder / name).read_bytes())
            changed = {key: token for key, token in self._tokens.items() if self._names.get(key) != token}
            if self._template is not None and content.pop("chat_template", None) is not None:
                changed["chat_template"] = self._template
            if changed:
                write_json(folder / name, {**content, **changed})
        if not (folder / TOKENIZER_CONFIG_FILE).is_file():
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_length,
                "clean_up_tokenization_spaces": False,
                # A batch of prompts is continued at its end.
                "padding_side": "left",
            }
            write_json(folder / TOKENIZER_CONFIG_FILE, {**settings, **self._tokens})
        if self._template is not None:
            (folder / TEMPLATE_FILE).write_text(self._template, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
