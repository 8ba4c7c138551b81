"""Chats as text: the template of a model, and which part of the text are answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train.engine.errors import UserError, one_line

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
# What `{% generation %}` blocks become, until the text is cut there. No text has these characters.
_MARK = "\U0010fffe"


class ChatTemplate:
    """A chat template of transformers, in Jinja.

        template = ChatTemplate(source, {"eos_token": "<|im_end|>"})
        text = "".join(text for text, is_answer in template.parts(messages))

    Raises:
      UserError: jinja2 is not installed, or the template is not one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ModuleNotFoundError as error:
            raise UserError("--data: a chat template needs jinja2: pip install 'brl-jax[hf]'") from error

        class Generation(jinja2.ext.Extension):
            """The block around what a model answers, which transformers adds to Jinja."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

            def marked(self, caller: Any) -> str:
                return f"{_MARK}{caller()}{_MARK}"

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=False, **options)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        # Without `strftime_now`, templates write a fixed date instead of today's.
        environment.globals |= {"raise_exception": refuse, **tokens}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"--tokenizer: its chat template cannot be read: {one_line(error)}") from error
        self._marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
        """The text of a chat in parts, and whether each is an answer.

        An answer is what the template's `generation` blocks hold. Without these it is what an assistant's message adds
        to the text up to where a model would begin to answer.

        Raises:
          ValueError: the template refuses the messages, or writes a message in another way if more follow.
        """
        text = self._write(messages)
        if self._marks:
            yield from ((part, i % 2 == 1) for i, part in enumerate(text.split(_MARK)))
            return
        at = 0
        for i, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before = self._write(messages[:i], add_generation_prompt=True)
            after = self._write(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before) and len(before) >= at):
                raise ValueError(
                    f"the chat template writes message {i + 1} in another way if it is the last, so where its text "
                    "begins and ends is not known; expected a chat that ends with its only answer"
                )
            yield text[at : len(before)], False
            yield text[len(before) : len(after)], True
            at = len(after)
        yield text[at:], False

    def _write(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        try:
            return self._template.render(messages=messages, **{"add_generation_prompt": False, **options})
        except Exception as error:  # a template may do anything with a message
            raise ValueError(f"the chat template refuses the messages: {one_line(error)}") from error


def template_of(config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a tokenizer_config.json of transformers; None if it has none. Of several, the default one."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, Mapping)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    tokens = {}
    for name, token in config.items():
        content = token.get("content") if isinstance(token, Mapping) else token
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return ChatTemplate(source, tokens)
