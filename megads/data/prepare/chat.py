"""Conversations: records of messages, and the chat template that makes text of them.

Templates are Hugging Face's: Jinja that reads `messages`, `add_generation_prompt`, `bos_token` and `eos_token`. They
come with a tokenizer, as chat_template.jinja or within tokenizer_config.json. They run in Jinja's sandbox, which lets
them compute text and nothing else.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from megads.data.config import RecordFields, TextSpecialTokens
from megads.data.indexed.sidecar import TOKENIZER_CONFIG_FILE, load_tokenizer, template_beside
from megads.errors import ConfigError

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{ message['role'] | capitalize + ': ' }}{{ message['content'] }}\
{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""For tokenizers without a template of their own, which need no token but the end of a document."""
USER, ASSISTANT = "user", "assistant"
_SHARE_GPT_ROLES = {"human": USER, "gpt": ASSISTANT}
Message = Mapping[str, Any]


class TemplateFault(Exception):
    """A template refuses messages; the text says why."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks what an assistant says; megads finds it by the generation prompt."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    def refuse(message: str) -> NoReturn:
        raise TemplateFault(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


@dataclass(frozen=True)
class ChatTemplate:
    """Makes text of messages.

    Attributes:
        source: Jinja.
        eos_token: what it may put behind an answer; empty for none.
        special_tokens: of the tokenizer, which messages may not spell; empty lets them.
    """

    source: str
    eos_token: str = ""
    special_tokens: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Returns the text of messages.

        Args:
            messages: each with `role` and `content`.
            generation_prompt: end with what stands before an answer.

        Raises:
            TemplateFault: the template refuses them, or fails.
        """
        try:
            return _compiled(self.source).render(
                messages=messages, add_generation_prompt=generation_prompt, bos_token="", eos_token=self.eos_token
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateFault(f"{type(error).__name__}: {error}") from error

    def turns(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Returns what is given and what is learnt by turns: everything before an answer, and the answer with its end.

        What follows the last answer is left out. Where a template writes earlier answers in another way as soon as more
        follows, as those of reasoning models do, only the last answer is learnt.

        Args:
            messages: each with `role` and `content`.

        Raises:
            TemplateFault: there is no answer to learn, or the template cannot tell where it begins.
        """
        self._require_no_special_token(messages)
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers:
            raise TemplateFault("there is no message of the assistant")
        found: list[str] = []
        done = ""
        for place in answers:
            before, through = self.render(messages[:place], True), self.render(messages[: place + 1], False)
            if not through.startswith(before) or len(through) == len(before):
                raise TemplateFault("the template does not put an answer behind its generation prompt")
            if not before.startswith(done):
                found, done = [], ""
            found += [before[len(done) :], through[len(before) :]]
            done = through
        return tuple(found)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text of messages and what stands before an answer; raises as `render`, and on special tokens."""
        self._require_no_special_token(messages)
        return self.render(messages, True)

    def _require_no_special_token(self, messages: Sequence[Message]) -> None:
        texts = list(_texts(messages))
        spelled = next((token for token in self.special_tokens if any(token in text for text in texts)), None)
        if spelled is not None:
            raise TemplateFault(f"a message spells the special token {spelled}")

    def end_of_answer(self, tokenizer: Tokenizer) -> str | None:
        """Returns the special token with which the template ends an answer; None where it ends with none."""
        try:
            *_, answer = self.turns([{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}])
        except TemplateFault:
            return None
        special = special_tokens(tokenizer)
        behind = answer.partition("b")[2]
        return min((token for token in special if token in behind), key=behind.index, default=None)


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield from (value for value in message.values() if isinstance(value, str))


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the tokens that no ordinary text may spell."""
    return tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)


def messages_of(value: object) -> list[dict[str, Any]]:
    """Returns the messages of a record.

    Args:
        value: a list of objects with `role` and `content`, or, as ShareGPT has them, `from` and `value`.

    Raises:
        TemplateFault: it is something else.
    """
    if not isinstance(value, list) or not value:
        raise TemplateFault("want a list of messages")
    found = []
    for number, given in enumerate(value, 1):
        if not isinstance(given, dict):
            raise TemplateFault(f"message {number} is no object")
        message = given
        if "role" not in given and "from" in given:
            role = given["from"]
            message = {"role": _SHARE_GPT_ROLES.get(role, role), "content": given.get("value")}
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TemplateFault(f"message {number} has no role and content that are text")
        found.append(message)
    return found


@dataclass(frozen=True)
class Conversations:
    """What of a record makes a document, where it is a conversation.

    Attributes:
        field: of the JSON object that holds the messages.
        template: makes text of them.
    """

    field: str
    template: ChatTemplate

    def __str__(self) -> str:
        return repr(self.field)


def find_template(given: str | None, tokenizer_file: Path | None, key: str) -> str:
    """Returns the chat template that a dataset is made with.

    Args:
        given: a file with one: Jinja, or a tokenizer_config.json; None takes the tokenizer's own, or a plain one.
        tokenizer_file: the tokenizer; None where it is yet to be learnt.
        key: of the config that the file comes from, for messages.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    if given is None:
        found = None if tokenizer_file is None else template_beside(tokenizer_file)
        source = PLAIN_TEMPLATE if found is None else found
    elif Path(given).name == TOKENIZER_CONFIG_FILE:
        inside = template_beside(Path(given).with_name("tokenizer.json"))
        if inside is None:
            raise ConfigError(f"{key} = {given}: has no chat_template")
        source = inside
    else:
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key} = {given}: cannot be read as UTF-8 text: {error}") from error
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        shown = given or "the tokenizer's own"
        raise ConfigError(f"{key} = {shown}: is no Jinja template: {error}") from error
    return source


def conversations(
    config: RecordFields,
    tokenizer_file: Path | None,
    end_of_document: str | None,
    text_special_tokens: TextSpecialTokens,
    section: str = "",
) -> Conversations | None:
    """Returns how records of conversations are read; None where the config names no field of messages.

    Args:
        config: names the field, and perhaps the template.
        tokenizer_file: the tokenizer; None where it is yet to be learnt.
        end_of_document: its token.
        text_special_tokens: with ignore, a message may not spell a special token.
        section: of the config, with a dot at its end; or empty.

    Raises:
        ConfigError: the template cannot be read, or is none.
        DataError: the tokenizer cannot be read.
    """
    if config.messages_field is None:
        return None
    source = find_template(config.chat_template, tokenizer_file, f"{section}chat_template")
    special: tuple[str, ...] = () if end_of_document is None else (end_of_document,)
    if tokenizer_file is not None:
        special = special_tokens(load_tokenizer(tokenizer_file))
    reserved = special if text_special_tokens is TextSpecialTokens.ignore else ()
    return Conversations(config.messages_field, ChatTemplate(source, end_of_document or "", reserved))
