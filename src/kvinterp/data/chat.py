"""Renders messages with the chat template of a model's own tokenizer, by transformers in Jinja's
sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvinterp.data.example import Prompt
from kvinterp.data.tokenizing import ids_of, kept_of
from kvinterp.errors import InputError, shown


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str, **options: Any
) -> str:
    """Renders messages as a text with the tokenizer's chat template.

    Args:
        tokenizer: The model's tokenizer, from transformers; or None.
        messages: Each with ``role`` and ``content``, in order.
        model: The model's name, for errors.
        options: Further arguments of the template, such as ``add_generation_prompt``.

    Raises:
        InputError: There is no chat template, it refuses these messages, or it leaves them out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"model {model} has no chat template: leave out --chat template, or chat=... among the prompts."
        )
    turns = [dict(message) for message in messages]
    roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
    # A template may raise any error.
    except Exception as error:
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}, {error}"
        raise InputError(
            f"the chat template of {model} does not take these messages ({why}; roles: {roles}): leave out the system message, "
            "or give the prompts without a template."
        ) from error
    question = next(
        (message["content"] for message in reversed(turns) if message["role"] == "user"), ""
    )
    if kept_of(question, text) < 0.5:
        raise InputError(
            f"the chat template of {model} leaves out what it is given: of the message {shown(question[:60])} it makes "
            f"{shown(text[:60])}; mend it, or give the prompts without a template."
        )
    return text


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str) -> list[int]:
    """Tokenises messages up to where the model's own turn begins.

    The template writes all special tokens, so the tokenizer adds none.

    Args:
        tokenizer: The model's tokenizer, from transformers; or None.
        messages: Each with ``role`` and ``content``, in order.
        model: The model's name, for errors.

    Raises:
        InputError: As :func:`render` and :func:`~kvinterp.data.tokenizing.ids_of`.
    """
    text = render(tokenizer, messages, model, add_generation_prompt=True)
    return ids_of(tokenizer, text, model, add_special_tokens=False)


def prompt_ids(adapter: Any, prompt: str | Prompt) -> list[int]:
    """Tokenises a text or a prompt; a prompt with messages in the model's chat template.

    Raises:
        InputError: There is no tokenizer, no chat template, or no token.
    """
    if isinstance(prompt, str) or not prompt.messages:
        return list(adapter.encode(prompt if isinstance(prompt, str) else prompt.text))
    return chat_tokens(adapter.tokenizer, prompt.messages, adapter.facts.name)
