"""What a method of a user's cache returns, led through readers that may replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Led:
    """A method of a user's cache, and who may replace what it hands to attention, in order."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.readers: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        read = self.method(*args, **kwargs)
        for reader in self.readers:
            new = reader(read, *args, **kwargs)
            read = read if new is None else new
        return read


def lead(cache: Any, name: str, reader: Callable[..., Any]) -> Callable[[], None]:
    """Leads what a method of a cache returns through a reader, before those that it is led through already.

    Args:
        cache: The cache, of anyone's.
        name: The method.
        reader: Called with what the method returned and with what it was given; what it returns takes that place.

    Returns:
        How to undo it, in whatever order with the others.
    """
    before, led = cache.__dict__.get(name), cache.__dict__.get(name)
    if not isinstance(led, _Led):
        led = cache.__dict__[name] = _Led(getattr(cache, name))
    led.readers.insert(0, reader)

    def undo() -> None:
        led.readers.remove(reader)
        if led.readers or cache.__dict__.get(name) is not led:
            return
        if before is None:
            del cache.__dict__[name]
        else:
            cache.__dict__[name] = before

    return undo
