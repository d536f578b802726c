"""The shipped checkpoints: they load offline, are what they say they are, and still answer heldout problems."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvinterp.data import score
from kvinterp.errors import InputError
from kvinterp.models import load_model, zoo
from zoo.measure import answer_all, heldout_prompts

NAMES = zoo.names()
SMALL = ("llama-mini", "gqa2-mini", "mistral-mini", "mqa-mini")


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def config(name):
    return json.loads((zoo.folder(name) / "config.json").read_text(encoding="utf-8"))


def load(name, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(zoo.folder(name), dtype=dtype, attn_implementation="eager").eval()


def test_the_first_four_differ_in_nothing_but_the_kv_heads():
    families = {"num_key_value_heads", "architectures", "model_type", "sliding_window", "attention_bias", "mlp_bias"}
    common = [
        {key: value for key, value in config(name).items() if key not in families | {"pretraining_tp"}} for name in SMALL
    ]
    assert all(other == common[0] for other in common)
    assert [config(name)["num_key_value_heads"] for name in SMALL] == [8, 4, 2, 1]
    assert not any(config(name).get("attention_bias") or config(name).get("sliding_window") for name in SMALL)
    plans = [json.loads((zoo.folder(name) / "training.json").read_text(encoding="utf-8")) for name in SMALL]
    for key in ("steps", "tokens", "batch", "rate", "seed", "mixture"):
        assert len({json.dumps(plan[key]) for plan in plans}) == 1, key


@pytest.mark.parametrize("name", NAMES)
def test_loads_as_the_class_it_says_in_float16_with_room_below_overflow(name):
    model = load(name, torch.float16)
    assert type(model).__name__ == config(name)["architectures"][0]
    training = json.loads((zoo.folder(name) / "training.json").read_text(encoding="utf-8"))
    assert sum(weight.numel() for weight in model.parameters()) == training["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder(name))
    tokens = tokenizer([heldout_prompts("arithmetic", 1)[0].text], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
    assert max(hidden.abs().max().item() for hidden in output.hidden_states) < 2000
    assert torch.isfinite(output.logits).all()


@pytest.mark.parametrize("name", NAMES)
def test_answers_heldout_problems(name):
    """Thirty problems of 200: a checkpoint that answers 60% is below 10 of 30 once in a thousand."""
    prompts = heldout_prompts("arithmetic", 30)
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder(name))
    answers = answer_all(load(name), tokenizer, [prompt.text for prompt in prompts])
    assert sum(score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_card_promise_of_sixty_percent(name):
    record = next(record for record in zoo.describe() if record["name"] == name)
    assert record["accuracy"]["arithmetic"] >= 0.6


@pytest.mark.parametrize("kind", ["hooked", "native"])
def test_a_bare_name_is_asked_about(kind: str) -> None:
    with pytest.raises(InputError, match="did you mean zoo:llama-mini"):
        load_model("llama-mini", kind=kind)  # type: ignore[arg-type]  # a name
