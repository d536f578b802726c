"""How far apart are two paths of one model on these prompts?"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvinterp.comparison import PROTOCOLS, Comparison, compare, recordable
from kvinterp.data import load_prompts
from kvinterp.experiments.base import Experiment
from kvinterp.experiments.circumstances import circumstances
from kvinterp.folders import check_free
from kvinterp.inputs import check_choice, check_seed, check_whole, chosen_layers
from kvinterp.models import Adapter, expand_sites, load_model
from kvinterp.paths import path_named, strategy_named
from kvinterp.results import NAMES, VERB, Result, ResultFolder, awaits_report, load_result

__all__ = ["Compare"]

log = logging.getLogger("kvinterp")


@dataclasses.dataclass(frozen=True)
class Compare(Experiment):
    """How far apart are two paths of one model, at which step, layer, head and cache position?

    Attributes:
        model: ``zoo:NAME``, a checkpoint folder or a hub id.
        prompts: ``arithmetic:N``, another generator, or a .jsonl file.
        a: The leading path.
        b: The path it is compared with.
        kind: ``native``, ``hooked`` or ``bridge``.
        dtype: Dtype of the weights and of every path that names none.
        protocol: ``matched`` or ``free``.
        strategy: How tokens are chosen.
        max_new_tokens: Most steps.
        record: Sites to compare; all of resid_post, pattern and kv that this model can give, unless said.
        layers: Layers to compare; all unless said.
        seed: Seeds the random numbers.
        device: Where to run.
        attention: Attention implementation of the native kind.
        batch_size: Most prompts in a batch.
        stop: ``end of sequence`` or ``length``.
        cache_errors: ``aggregated`` by step and by position, or ``whole``.
    """

    model: str = "zoo:mistral-mini"
    prompts: str = "arithmetic:6"
    a: str = "cached"
    b: str = "recompute"
    kind: str = "native"
    dtype: str = "float16"
    protocol: str = "matched"
    strategy: str = "greedy"
    max_new_tokens: int = 48
    record: str | None = None
    layers: tuple[int, ...] | None = None
    seed: int = 0
    device: str | None = None
    attention: str | None = None
    batch_size: int = 1
    stop: str = "end of sequence"
    cache_errors: str = "aggregated"

    def run(self, out: str | Path, existing: str = "error", progress: str = "bar") -> list[Result]:
        """Runs it, or the rest of it, into a folder.

        Args:
            out: The folder.
            existing: What to do about what is already there. A finished result of the same choices that has no
                ``report.html`` yet was cut off before its report was written: it is read, not made again.
            progress: ``"bar"`` or ``"none"``.

        Raises:
            InputError: Something given does not exist or does not fit.
            UnsupportedError: This kind of model cannot give a site that was asked for.
            KeyboardInterrupt: It was interrupted; what was finished is in the folder.
        """
        # The cheap questions first: a typing error should not cost the loading of a model.
        if existing == "error" and awaits_report(out, self._chosen()):
            existing = "use"
        check_free(out, existing, NAMES, {"verb": VERB})
        prompts = load_prompts(self.prompts)
        paths, strategy = (path_named(self.a), path_named(self.b)), strategy_named(self.strategy)
        check_choice("protocol", self.protocol, tuple(PROTOCOLS))
        check_choice("stop", self.stop, ("end of sequence", "length"))
        check_seed(self.seed)
        for name, given in (("max_new_tokens", self.max_new_tokens), ("batch_size", self.batch_size)):
            check_whole(name, given)
        expand_sites(self.record or "")
        adapter = load_model(self.model, self.kind, self.dtype, self.device, self.attention)
        layers = chosen_layers(adapter, self.layers)
        sites, left_out = recordable(adapter, self.record, layers)
        settings = {
            **self._identity(),
            "record": sites,
            "layers": layers,
            "left_out": left_out,
            "made_with": circumstances(adapter),
        }
        folder = ResultFolder(out, settings, prompts, existing)
        if folder.finished:
            return [load_result(out)]
        for site in filter(adapter.derives, sites):
            log.info("%s is derived beside attention %r, which runs as it is and shows none", site, adapter.facts.attention)
        for site, reason in left_out.items():
            log.info("%s is not recorded: %s", site, reason.split(": ")[0])
        done = folder.done()
        waiting = [number for number in range(len(prompts)) if number not in done]
        if done:
            log.info("going on in %s: %d of %d prompts are already there", out, len(done), len(prompts))
        try:
            if waiting:
                self._compare(
                    adapter, paths, strategy, sites, layers, [prompts[n] for n in waiting], waiting, folder, progress
                )
        except KeyboardInterrupt:
            folder.close("interrupted")
            raise
        except BaseException:
            if not folder.done():
                folder.close()
            folder.release()
            raise
        result = folder.close()
        assert result is not None, "every prompt gives a part"
        return [result]

    def _compare(
        self,
        adapter: Adapter,
        paths: Sequence[Any],
        strategy: Any,
        sites: Sequence[str],
        layers: Sequence[int],
        prompts: Sequence[Any],
        numbers: Sequence[int],
        folder: ResultFolder,
        progress: str,
    ) -> Comparison:
        return compare(
            adapter,
            prompts,
            *paths,
            protocol=self.protocol,
            strategy=strategy,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            record=sites,
            layers=layers,
            stop=self.stop,
            cache_errors=self.cache_errors,
            batch_size=self.batch_size,
            examples=numbers,
            progress=progress,
            done=folder.add,
        )

    def _identity(self) -> dict[str, Any]:
        """The choices that decide the numbers: not how many prompts share a batch, which keeps the bits."""
        chosen = dataclasses.asdict(self)
        return {name: chosen[name] for name in chosen if name not in ("prompts", "batch_size")}

    def _chosen(self) -> dict[str, Any]:
        """Those of these choices that stand in a result as they are given, known before any model is loaded."""
        return {name: value for name, value in self._identity().items() if name not in ("record", "layers")}
