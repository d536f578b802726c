"""What may never come to an end is waited for a while, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What a call returns, where it returns in time: a library's own timeout is that of each try, or there is none.

    What goes on behind a call that took too long ends with the process.

    Raises:
        TimeoutError: It did not return; otherwise whatever it raised.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(ask())
        # Raised again where it is waited for. BaseException: what panics in Rust is no Exception.
        except BaseException as error:
            raised.append(error)

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        raise TimeoutError(f"it did not answer within {seconds:.3g} seconds")
    if raised:
        raise raised[0]
    return returned[0]
