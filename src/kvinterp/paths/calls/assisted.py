"""``assisted(3)``: transformers' own assisted generation drafts, checks and takes back; the tokens taken are the path's."""

from __future__ import annotations

import dataclasses

from kvinterp.common.checks import check_whole
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.calls.base import Call, Feeder, Loop
from kvinterp.paths.calls.generate import check_generates, generating, run


@dataclasses.dataclass(frozen=True)
class Assisted(Call):
    """Decoding by ``generate(prompt_lookup_num_tokens=...)``, which drafts what followed the same tokens earlier in the text.

    Attributes:
        drafts: Most of them in one forward.
    """

    drafts: int = 3

    def __post_init__(self) -> None:
        check_whole("drafts", self.drafts)

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """The drafts take positions behind the last token."""
        return 1, length, steps + self.drafts

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses a model that has no ``generate()`` of transformers'."""
        check_generates(adapter, self)

    def feed(self, feeder: Feeder) -> Loop:
        """Runs each forward that ``generate()`` asks for; tells it the path's tokens, as far as its drafts were right."""
        view, length = feeder.view, feeder.prompt.shape[1]
        if view.writes:
            raise UnsupportedError(
                f"call={self} shows the rows of a draft after their forward, where nothing can be put in their place: use "
                f"verified({self.drafts}), which then takes no draft."
            )
        with generating(feeder, self, prompt_lookup_num_tokens=self.drafts) as asked:
            for given in asked.forwards():
                left = int(asked.cache.get_seq_length())
                feeder.store.cropped(left)
                view.crop(left)
                tokens = given["input_ids"]
                drafts = tokens[:, length + len(asked.sent) - left :]
                made = run(feeder, asked, given, tokens.shape[1] - drafts.shape[1])
                sent = yield from feeder.checked(made.logits[:, -1 - drafts.shape[1] :], drafts)
                asked.answer(made, sent)

    def missing(self, witness: dict[str, int]) -> str:
        """Drafts, right or wrong."""
        drafted = witness.get("drafts accepted", 0) + witness.get("drafts rejected", 0)
        return "" if drafted else "transformers drafted nothing: no token had stood in the text before"
