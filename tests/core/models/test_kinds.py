"""One default kind, and one word for TransformerLens's own model, whichever version is installed."""

import inspect

import kvinterp as kv
from kvinterp.commands.registry import experiment_named, experiments
from support import has_hooked_transformer

OWN = "hooked" if has_hooked_transformer() else "bridge"


def test_there_is_one_default_kind():
    """Python took hooked and the command line native, which compute other bits: one question had two answers."""
    defaults = {inspect.signature(verb).parameters["kind"].default for verb in (kv.load_model, kv.patch_panel)}
    assert defaults | {each.kind for each in map(experiment_named, experiments()) if hasattr(each, "kind")} == {"native"}
    assert kv.load_model("zoo:mqa-mini").kind == "native"


def test_transformer_lens_is_what_the_installed_version_has(caplog):
    with caplog.at_level("INFO", logger="kvinterp"):
        model = kv.load_model("zoo:mqa-mini", kind="transformer_lens", device="cpu")
    assert model.kind == OWN
    assert f"loading zoo:mqa-mini as {OWN} in float16 on cpu" in caplog.text
    assert repr(model) == f"<zoo:mqa-mini: {OWN}, float16, cpu>"
    assert kv.wrap(model.model).kind == OWN
