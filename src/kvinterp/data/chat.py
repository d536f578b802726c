"""Messages in the chat template of a model's own tokenizer, rendered by transformers in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvinterp.data.example import Prompt
from kvinterp.data.tokenizing import ids_of, kept_of
from kvinterp.errors import InputError, shown


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str, **how: Any) -> str:
    """Messages as the text that the tokenizer's chat template makes of them.

    Args:
        tokenizer: That of the model, from transformers; or None.
        messages: Each with ``role`` and ``content``, in order.
        model: The model's name, for errors.
        how: What else the template is asked with, as ``add_generation_prompt``.

    Raises:
        InputError: There is no chat template, it does not take these messages, or leaves them out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"model {model} has no chat template: leave out --chat template, or chat=... among the prompts.")
    given = [dict(each) for each in messages]
    roles = ", ".join(dict.fromkeys(str(each["role"]) for each in messages))
    try:
        said = str(tokenizer.apply_chat_template(given, tokenize=False, **how))
    # A template may raise anything: what it divides by is its own affair.
    except Exception as error:
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}, {error}"
        raise InputError(
            f"the chat template of {model} does not take these messages ({why}; roles: {roles}): leave out the system message, "
            "or give the prompts without a template."
        ) from error
    asked = next((each["content"] for each in reversed(given) if each["role"] == "user"), "")
    if kept_of(asked, said) < 0.5:
        raise InputError(
            f"the chat template of {model} leaves out what it is given: of the message {shown(asked[:60])} it makes "
            f"{shown(said[:60])}; mend it, or give the prompts without a template."
        )
    return said


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str) -> list[int]:
    """Token ids of messages, up to where the model's own turn begins.

    The template writes the special tokens, the first one too, so the tokenizer adds none.

    Args:
        tokenizer: That of the model, from transformers; or None.
        messages: Each with ``role`` and ``content``, in order.
        model: The model's name, for errors.

    Raises:
        InputError: As :func:`rendered` and :func:`~kvinterp.data.tokenizing.ids_of` say.
    """
    said = rendered(tokenizer, messages, model, add_generation_prompt=True)
    return ids_of(tokenizer, said, model, add_special_tokens=False)


def prompt_ids(adapter: Any, prompt: str | Prompt) -> list[int]:
    """Token ids of a text, or of a prompt: of its messages in the model's chat template, where it has any.

    Raises:
        InputError: There is no tokenizer or no chat template, or there is no token.
    """
    if isinstance(prompt, str) or not prompt.messages:
        return list(adapter.encode(prompt if isinstance(prompt, str) else prompt.text))
    return chat_tokens(adapter.tokenizer, prompt.messages, adapter.facts.name)
