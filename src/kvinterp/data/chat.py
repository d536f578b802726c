"""Messages in the chat template of a model's own tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from kvinterp.data.example import Prompt
from kvinterp.data.rendering import SECONDS, UNBOUNDED
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
        InputError: There is no chat template, it does not take these messages, leaves them out, or comes to no end.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"model {model} has no chat template: leave out --chat template, or chat=... among the prompts.")
    given = [dict(each) for each in messages]
    roles = ", ".join(dict.fromkeys(str(each["role"]) for each in messages))
    try:
        template = tokenizer.get_chat_template()
        bounded = not isinstance(template, str) or _is_bounded(template, given, tokenizer, how)
        said = tokenizer.apply_chat_template(given, tokenize=False, **how) if bounded else ""
    # A template may raise anything: what it divides by is its own affair.
    except Exception as error:
        why = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}, {error}"
        raise InputError(
            f"the chat template of {model} does not take these messages ({why}; roles: {roles}): leave out the system message, "
            "or give the prompts without a template."
        ) from error
    if not bounded:
        raise InputError(
            f"the chat template of {model} takes more than {SECONDS} seconds of processor time, or more memory than any text "
            "needs: it is broken or hostile; mend it, or give the prompts without a template."
        )
    asked = next((each["content"] for each in reversed(given) if each["role"] == "user"), "")
    if kept_of(asked, said) < 0.5:
        raise InputError(
            f"the chat template of {model} leaves out what it is given: of the message {shown(asked[:60])} it makes "
            f"{shown(said[:60])}; mend it, or give the prompts without a template."
        )
    return str(said)


_known: set[tuple[str, str]] = set()
"""Templates, and the roles of the messages, that came to an end in a process of their own."""


def _is_bounded(template: str, messages: list[dict[str, str]], tokenizer: Any, how: Mapping[str, Any]) -> bool:
    """Whether a template comes to an end in bounded memory and time, tried where it can do no harm, once for these roles."""
    key = template, " ".join(each["role"] for each in messages[:8])
    if key in _known or not sys.executable:
        return True
    # Long texts are the user's own, and not what a template is tried with.
    short = [{name: value[:1000] if isinstance(value, str) else value for name, value in m.items()} for m in messages[:8]]
    variables = {**tokenizer.special_tokens_map, "messages": short, "tools": None, "documents": None, **how}
    program = [sys.executable, str(Path(__file__).with_name("rendering.py"))]
    try:
        asked = json.dumps({"template": template, "variables": variables}, default=str)
        left = subprocess.run(
            program, input=asked.encode(), capture_output=True, timeout=4 * SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True  # A system that starts no process.
    if left == UNBOUNDED or left < 0:
        return False
    _known.add(key)
    return True


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
    if isinstance(prompt, str):
        return list(adapter.encode(prompt))
    chat = prompt.messages
    for each in chat:
        adapter.check_length(each["content"])
    return chat_tokens(adapter.tokenizer, chat, adapter.facts.name) if chat else list(adapter.encode(prompt.text))
