"""Messages in the chat template of a model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from kvinterp.data.example import Prompt
from kvinterp.errors import InputError

__all__ = ["chat_tokens", "prompt_ids"]


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]], model: str) -> list[int]:
    """Token ids of messages, up to where the model's own turn begins.

    The template writes the special tokens, the first one too, so the tokenizer adds none.

    Args:
        tokenizer: That of the model, from transformers; or None.
        messages: Each with ``role`` and ``content``, in order.
        model: The model's name, for errors.

    Raises:
        InputError: There is no chat template, or it does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"model {model} has no chat template: leave out --chat template, or chat=... among the prompts.")
    try:
        said = tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(dict.fromkeys(each["role"] for each in messages))
        raise InputError(
            f"the chat template of {model} does not take these messages ({error}; roles: {roles}): leave out the system message, "
            "or give the prompts without a template."
        ) from error
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def prompt_ids(adapter: Any, prompt: str | Prompt) -> list[int]:
    """Token ids of a text, or of a prompt: of its messages in the model's chat template, where it has any.

    Raises:
        InputError: There is no tokenizer or no chat template, or there is no token.
    """
    if isinstance(prompt, str):
        return list(adapter.encode(prompt))
    chat = prompt.messages
    for each in chat:
        adapter.check_length(each["content"])
    return chat_tokens(adapter.tokenizer, chat, adapter.facts.name) if chat else list(adapter.encode(prompt.text))
