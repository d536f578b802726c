"""What ``kvinterp list formats`` shows: the files of other engines that are read; no reader is
imported.
"""

from kvinterp.common.spec import first_line, plugins_read


def formats() -> list[dict[str, str]]:
    """A row of text for each format."""
    readers = plugins_read("kvinterp.engines.readers.base:Reader")
    whole = {
        "name": "kl_base",
        "what it is": "llama.cpp's log-probs of whole texts, as llama-perplexity --kl-divergence-base writes them",
    }
    return [
        *({"name": name, "what it is": first_line(kind)} for name, kind in readers.items()),
        whole,
    ]
