"""The shipped checkpoints: they load offline, are what they say they are, and still answer heldout problems."""

import json
import subprocess
import sys
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvinterp.data import TASKS, score, split_of
from kvinterp.errors import InputError
from kvinterp.models import load_model, zoo
from zoo.build import build_model
from zoo.card import card_text
from zoo.measure import answer_all, heldout_prompts, turn
from zoo.recipe import Plan, batches, documents

NAMES = zoo.names()
SMALL = ("llama-mini", "gqa2-mini", "mistral-mini", "mqa-mini")
LIMIT = 15_000_000


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def config(name):
    return json.loads((zoo.folder(name) / "config.json").read_text(encoding="utf-8"))


def load(name, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(zoo.folder(name), dtype=dtype, attn_implementation="eager").eval()


def test_together_at_most_fifteen_megabytes():
    root = zoo.folder("llama-mini").parent
    assert sum(file.stat().st_size for name in NAMES for file in (root / name).iterdir()) <= LIMIT


def test_the_one_with_heads_of_64_is_small_enough_and_restates_its_own_words():
    assert (zoo.folder("llama64-mini") / "model.safetensors").stat().st_size <= 4_000_000
    assert config("llama64-mini")["head_dim"] == 64
    assert config("llama64-mini")["num_attention_heads"] == 2 * config("llama64-mini")["num_key_value_heads"]
    prompts = [turn(example).prompt for example in TASKS["restate"].generate(8, 99)]
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("llama64-mini"))
    answers = answer_all(load("llama64-mini"), tokenizer, [prompt.text for prompt in prompts])
    assert sum(score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)) >= 4


def test_turned_restatements_are_training_texts_of_their_own():
    example = TASKS["restate"].generate(1, 5)[0]
    turned = turn(example)
    assert turned.prompt.text == f"Text: {example.prompt.answer}\nIn other words:"
    assert example.prompt.text == f"Text:{turned.completion}\nIn other words:"
    assert score(turned.prompt, turned.completion)
    plain, other = (list(islice(documents(3, share), 60)) for share in (0.0, 0.5))
    assert plain == list(islice(documents(3), 60))
    restated = [prompt for prompt, _ in other if prompt.startswith("Text:")]
    assert any("belong to" in prompt or "The home of" in prompt or "You pay" in prompt for prompt in restated)
    assert all(split_of(prompt) == "train" for prompt, _ in other)


def test_unknown_checkpoint_lists_near_names():
    with pytest.raises(InputError, match="did you mean 'llama-mini'"):
        zoo.folder("lama-mini")


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


def test_gemma_has_the_parts_the_others_lack():
    own = config("gemma2-mini")
    assert (own["attn_logit_softcapping"], own["final_logit_softcapping"], own["sliding_window"]) == (50.0, 30.0, 32)
    assert own["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert own["query_pre_attn_scalar"] == own["head_dim"]
    assert own["num_attention_heads"] == 2 * own["num_key_value_heads"]


def test_the_one_with_experts_uses_them_all():
    """A router that sends every token to the same two experts shows no choice; each gets a twentieth of the tokens at least."""
    model, tokenizer = load("moe-mini"), AutoTokenizer.from_pretrained(zoo.folder("moe-mini"))
    chosen = {layer: [] for layer in range(4)}
    for layer, found in chosen.items():
        model.model.layers[layer].mlp.gate.register_forward_hook(lambda _, __, output, into=found: into.append(output[2]))
    with torch.no_grad():
        for task in TASKS:
            for prompt in heldout_prompts(task, 5):
                model(**tokenizer(prompt.text, return_tensors="pt"))
    for layer, found in chosen.items():
        count = torch.cat(found).flatten().bincount(minlength=8)
        assert count.min() >= count.sum() / 40, (layer, count.tolist())


def test_one_tokenizer_for_all():
    assert len({(zoo.folder(name) / "tokenizer.json").read_bytes() for name in NAMES}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_begins_with_bos_splits_digits_and_gives_back_any_text(name):
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder(name))
    for text in ("", " two  spaces ", "Ünïcödé 日本 🙂\n\t'don't' , . !", "a\r\nb\u2028c", "42 + 7"):
        tokens = tokenizer(text)["input_ids"]
        assert tokens[0] == tokenizer.bos_token_id
        assert tokens.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.tokenize("4217") == ["4", "2", "1", "7"]
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    own = config(name)
    assert (own["bos_token_id"], own["eos_token_id"], own["pad_token_id"]) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )


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


def test_card_is_what_the_files_say():
    assert (zoo.folder("llama-mini").parent / "CARD.md").read_text(encoding="utf-8") == card_text()


def test_describe_is_complete():
    assert tuple(record["name"] for record in zoo.describe()) == NAMES
    assert all(record["bytes"] > 1_000_000 for record in zoo.describe())


def test_weights_of_one_name_and_shape_start_alike():
    one, other = (dict(build_model(name, 7).named_parameters()) for name in ("llama-mini", "mqa-mini"))
    shared = [key for key in one if one[key].shape == other[key].shape]
    assert len(shared) == len(one) - 2 * 4
    assert all(torch.equal(one[key], other[key]) for key in shared)
    again = dict(build_model("llama-mini", 8).named_parameters())
    assert not torch.equal(again["model.embed_tokens.weight"], one["model.embed_tokens.weight"])


def test_training_batches_weigh_completions_fully_and_padding_not_at_all():
    words = AutoTokenizer.from_pretrained(zoo.folder("mistral-mini"))
    plan = Plan(batch=8)
    for tokens, weights in islice(batches(words, plan), 6):
        assert (tokens[:, 0] == words.bos_token_id).all()
        assert ((tokens == words.pad_token_id) == (weights == 0))[:, 1:].all()
        assert (weights[tokens == words.eos_token_id] == 1).all()
        for row, weight in zip(tokens, weights, strict=True):
            prompt, answer = words.decode(row[weight == plan.prompt_weight]), words.decode(row[weight == 1])
            assert prompt.endswith(":")
            assert answer.startswith(" ")
            assert split_of(prompt) == "train"


def test_importing_the_zoo_alone_brings_no_torch():
    """The package above is stood in for, so that only the zoo's own imports count."""
    above = zoo.folder("llama-mini").parent.parent
    code = f"""
import sys, types
above = sys.modules["kvinterp.models"] = types.ModuleType("kvinterp.models")
above.__path__ = [{str(above)!r}]
import kvinterp
before = "torch" in sys.modules
import kvinterp.models.zoo as zoo
zoo.describe()
sys.exit("torch" in sys.modules and not before)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["hooked", "native"])
def test_a_bare_name_is_asked_about(kind: str) -> None:
    with pytest.raises(InputError, match="did you mean zoo:llama-mini"):
        load_model("llama-mini", kind=kind)  # type: ignore[arg-type]  # a name
