"""Conversations: records of messages, and the chat template that renders them as text.

Templates are Hugging Face's: Jinja templates with the variables `messages`, `tools`, `add_generation_prompt`,
`bos_token` and `eos_token`. They come with a tokenizer, as chat_template.jinja or in tokenizer_config.json. They run in
Jinja's sandbox, so they can only compute text.
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

from megads.api import (
    TOKENIZER_CONFIG_FILE,
    ConfigError,
    TextSpecialTokens,
    load_tokenizer,
    named_tokens,
    template_beside,
)
from megads.data.config import RecordFields

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{ message['role'] | capitalize + ': ' }}{{ message['content'] }}\
{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""Template for tokenizers without one; needs no special token except the end-of-document token."""
USER, ASSISTANT = "user", "assistant"
_ROLES = {
    **dict.fromkeys((USER, "human"), USER),
    **dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "model"), ASSISTANT),
    "system": "system",
    "tool": "tool",
}
"""Roles by their names in other datasets, such as ShareGPT's, in lower case; other roles are left to the template."""
Message = Mapping[str, Any]


class TemplateFault(Exception):
    """A template rejects messages; the text has the reason."""


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks assistant messages; megads finds them by the generation prompt
    instead."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    def refuse(message: str) -> NoReturn:
        raise TemplateFault(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


@dataclass(frozen=True)
class ChatTemplate:
    """Renders messages as text.

    Attributes:
        source: Jinja source.
        eos_token: token that the template may append to an answer; empty for none.
        special_tokens: special tokens of the tokenizer that messages must not spell; empty allows all.
        bos_token: token with which the template may begin; empty for none.
    """

    source: str
    eos_token: str = ""
    special_tokens: tuple[str, ...] = ()
    bos_token: str = ""

    @property
    def tokens(self) -> dict[str, str]:
        """The tokens that the template may write, by the names of its variables."""
        return {"bos_token": self.bos_token, "eos_token": self.eos_token}

    def render(self, messages: Sequence[Message], generation_prompt: bool, tools: Sequence[Any] | None = None) -> str:
        """Returns the text of messages.

        Args:
            messages: each with `role` and `content`.
            generation_prompt: whether to end with the text that precedes an answer.
            tools: JSON schemas of the functions that the assistant may call.

        Raises:
            TemplateFault: the template rejects the messages, or fails.
        """
        try:
            return _compiled(self.source).render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=generation_prompt, **self.tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateFault(f"{type(error).__name__}: {error}") from error

    def turns(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, ...]:
        """Returns prompts and answers alternately: everything before an answer, and the answer with its end token.

        Answers of weight 0 belong to the prompts. Text after the last answer is omitted. If a template renders earlier
        answers differently once more messages follow, as those of reasoning models do, only the last answer is trained
        on.

        Args:
            messages: results of `messages_of`.
            tools: JSON schemas of the functions that the assistant may call.

        Raises:
            TemplateFault: there is no answer, where an answer begins cannot be determined, or the template omits a
                function call.
        """
        self._require_no_special_token([*messages, tools])
        messages = self._with_parts_as_read(messages, tools)
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers:
            raise TemplateFault("there is no message of the assistant")
        answers = [place for place in answers if messages[place].get("weight", 1)]
        if not answers:
            raise TemplateFault("every message of the assistant has weight 0")
        found: list[str] = []
        done = ""
        for place in answers:
            before = self.render(messages[:place], True, tools)
            through = self.render(messages[: place + 1], False, tools)
            if not through.startswith(before) or len(through) == len(before):
                raise TemplateFault("the template does not put an answer behind its generation prompt")
            answer = through[len(before) :]
            for called in map(_called, messages[place].get("tool_calls") or ()):
                if str(called) not in answer:
                    raise TemplateFault(f"the template does not write the call of {called} in tool_calls")
            if not before.startswith(done):
                found, done = [], ""
            found += [before[len(done) :], answer]
            done = through
        return tuple(found)

    def _with_parts_as_read(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Sequence[Message]:
        """Returns the messages; content in parts is joined to one text if the template reads only texts.

        Such a template fails on a list, or writes it as Python shows it.
        """
        with_parts = [message for message in messages if isinstance(message.get("content"), list)]
        if not with_parts:
            return messages
        try:
            rendered = self.render(messages, False, tools)
            if not any(str(message["content"]) in rendered for message in with_parts):
                return messages
        except TemplateFault:
            pass
        joined = {id(message): "".join(part["text"] for part in message["content"]) for message in with_parts}
        return [
            {**message, "content": joined[id(message)]} if id(message) in joined else message for message in messages
        ]

    def prompt(self, messages: Sequence[Message]) -> str:
        """Returns the text of messages and the generation prompt; raises as `render`, and on special tokens in
        messages."""
        self._require_no_special_token(messages)
        return self.render(messages, True)

    def _require_no_special_token(self, messages: Sequence[Any]) -> None:
        texts = list(_texts(messages))
        spelled = next((token for token in self.special_tokens if any(token in text for text in texts)), None)
        if spelled is not None:
            raise TemplateFault(f"a message spells the special token {spelled}")

    def end_of_answer(self, tokenizer: Tokenizer) -> str | None:
        """Returns the special token with which the template ends an answer; None if there is none."""
        try:
            *_, answer = self.turns([{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}])
        except TemplateFault:
            return None
        special = special_tokens(tokenizer)
        behind = answer.partition("b")[2]
        return min((token for token in special if token in behind), key=behind.index, default=None)


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, also the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.items() for text in _texts(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _texts(item))


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns the special tokens of a tokenizer."""
    return tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)


def messages_of(value: object) -> list[dict[str, Any]]:
    """Returns the messages of a record.

    Args:
        value: a list of objects with `role` and `content`, or with `from` and `value` as in ShareGPT. The content is a
            text, a list of parts of type text, or null beside `tool_calls`. `weight` 0 leaves a message of the
            assistant out of the loss; 1 and null count it.

    Raises:
        TemplateFault: the value has another form.
    """
    if not isinstance(value, list) or not value:
        raise TemplateFault("want a list of messages")
    found = []
    for number, given in enumerate(value, 1):
        if not isinstance(given, dict):
            raise TemplateFault(f"message {number} is not an object")
        message = dict(given)
        if "role" not in given and "from" in given:
            message["role"], message["content"] = message.pop("from"), message.pop("value", None)
        role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
        if not isinstance(role, str) or not (isinstance(content, str | list) or (content is None and calls)):
            raise TemplateFault(f"message {number} lacks a role or content that is text")
        message["role"] = _ROLES.get(role.lower(), role)
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise TemplateFault(f"message {number} has a part of type {kind}, the model reads text only")
        if calls and not (isinstance(calls, list) and all(map(_called, calls))):
            raise TemplateFault(f"message {number}: want tool_calls with the name of a function each")
        if message.get("weight", 1) is None:  # of a table, in which every message has a weight
            del message["weight"]
        if message.get("weight", 1) not in (0, 1):
            raise TemplateFault(
                f"message {number}: weight = {message['weight']!r}: want 1 or 0, as a dataset records only whether an "
                "answer counts; kinds of conversations are weighted as datasets of their own in data.train"
            )
        found.append(message)
    return found


def _called(call: Any) -> str | None:
    """Returns the name of the function that an item of tool_calls calls; None if it has another form."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def tools_of(value: object) -> list[Any] | None:
    """Returns the tools of a record; None if there are none.

    Args:
        value: a list of JSON schemas, the same as a JSON text, or null.

    Raises:
        TemplateFault: the value has another form.
    """
    try:
        found = json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise TemplateFault(f"tools is not JSON: {error}") from error
    if not found:
        return None
    if not isinstance(found, list):
        raise TemplateFault("want a list of tools")
    return found


@dataclass(frozen=True)
class Conversations:
    """How to read a document from a record that is a conversation.

    Attributes:
        field: JSON field that holds the messages.
        template: chat template that renders them.
    """

    field: str
    template: ChatTemplate

    def __str__(self) -> str:
        return repr(self.field)


def find_template(given: str | None, tokenizer_file: Path | None, key: str) -> str:
    """Returns the chat template for a dataset.

    Args:
        given: file with a template: Jinja, or a tokenizer_config.json; None uses the tokenizer's own, or a plain one.
        tokenizer_file: tokenizer file; None if the tokenizer is yet to be trained.
        key: config key of `given`, for messages.

    Raises:
        ConfigError: the file cannot be read, or is not a template.
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
        raise ConfigError(f"{key} = {shown}: is not a valid Jinja template: {error}") from error
    return source


def conversations(
    config: RecordFields,
    tokenizer_file: Path | None,
    end_of_document: str | None,
    text_special_tokens: TextSpecialTokens,
    section: str = "",
) -> Conversations | None:
    """Returns how to read records of conversations; None if the config names no field of messages.

    Args:
        config: names the field, and optionally the template.
        tokenizer_file: tokenizer file; None if the tokenizer is yet to be trained.
        end_of_document: end-of-document token.
        text_special_tokens: with ignore, messages must not spell a special token.
        section: config section, with a trailing dot; or empty.

    Raises:
        ConfigError: the template cannot be read, or is invalid.
        DataError: the tokenizer cannot be read.
    """
    if config.messages_field is None:
        return None
    given = config.chat_template
    source = find_template(given, tokenizer_file, f"{section}chat_template")
    # A tokenizer_config.json also says what its template means by bos_token and eos_token.
    named_by = Path(given) if given is not None and Path(given).name == TOKENIZER_CONFIG_FILE else tokenizer_file
    named = {} if named_by is None else named_tokens(named_by)
    special: tuple[str, ...] = () if end_of_document is None else (end_of_document,)
    if tokenizer_file is not None:
        special = special_tokens(load_tokenizer(tokenizer_file))
    reserved = special if text_special_tokens is TextSpecialTokens.ignore else ()
    eos_token = named.get("eos_token", end_of_document or "")
    return Conversations(config.messages_field, ChatTemplate(source, eos_token, reserved, named.get("bos_token", "")))
