"""The cache mixin over model test configurations of transformers: `kvinterp.testing.CacheTesterMixin` on the models that their own tests make.

`python benchmarks/model_tests.py` runs the mixin's test on each in a child of one process, and appends what it says to
results/model_tests.jsonl, going on where it stopped: processor seconds, whether it passes, and every use that is wrong (a type that fails is
run again with a baseline that is written, as the mixin stops at the first). `--table` prints the table of docs/ci.md.

Their tests are no part of the wheel. The values here are those of `get_config` in tests/models/TYPE/test_modeling_TYPE.py as a public copy of
the repository had them (`COMMITS`), and of tests/causal_lm_tester.py, whose `CausalLMModelTester` gives a config each of its own attributes
that the config takes, by the config's name of it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import tempfile
import time
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

RESULTS = Path(__file__).parent / "results" / "model_tests.jsonl"
COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "initializer_range": 0.02,
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": False,
    "expert_interval": 1,
    "moe_layer_start_index": 0,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 36,
    "shared_expert_gate": True,
    "moe_num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": False,
}
"""What `CausalLMModelTester` holds by default."""
LLAMA3 = {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
OF_COMMON: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mixtral": {},
    "cohere": {},
    "hyperclovax": {},
    "gpt2": {},
    "jais2": {"hidden_act": "relu2"},
    "cwm": {"sliding_window": 8192, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3}},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "minimax": {"layer_types": None, "block_size": 3},
    "zaya": {
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 64,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "kimi_linear": {
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "silu",
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_conv_kernel_dim": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v4": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 64,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "mlp_layer_types": ["moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "sliding_window": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-6,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 2,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5,
        "attention_bias": False,
        "attention_dropout": 0.0,
    },
}
"""By type, what a tester that derives from it holds otherwise."""
MAMBA: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 98,
    "eos_token_id": 98,
    "pad_token_id": 98,
}
HYBRID: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attn_layer_indices": [1, 3],
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "mamba_n_groups": 1,
    "mamba_n_heads": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_OF_BERT = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "hidden_act", "hidden_dropout_prob",
            "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size", "initializer_range")  # fmt: skip
BERT: dict[str, Any] = {**{name: COMMON[name] for name in _OF_BERT}, "num_attention_heads": 4}
WRITTEN: dict[str, dict[str, Any]] = {
    "mamba": {**MAMBA, "intermediate_size": 32, "tie_word_embeddings": True},
    "falcon_mamba": {**MAMBA, "intermediate_size": 32, "tie_word_embeddings": True},
    "mamba2": {
        **MAMBA,
        "head_dim": 8,
        "num_heads": 8,
        "n_groups": 8,
        "state_size": 2,
        "conv_kernel": 4,
        "chunk_size": 8,
        "tie_word_embeddings": False,
    },
    "bamba": HYBRID,
    "falcon_h1": HYBRID,
    "jamba": {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "attn_layer_offset": 1,
        "attn_layer_period": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "use_mamba_kernels": False,
        "num_experts": 2,
    },
    "nemotron_h": {
        "vocab_size": 99,
        "hidden_size": 32,
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 40,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "use_mamba_kernels": False,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_n_groups": 8,
        "mamba_head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "zamba2": {
        "vocab_size": 99,
        "hidden_size": 16,
        "mamba_dt_rank": "auto",
        "mamba_d_state": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "n_mamba_heads": 8,
        "mamba_ngroups": 8,
        "intermediate_size": 4,
        "chunk_size": 8,
        "hidden_act": "gelu",
        "hidden_mamba_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    "xlstm": {
        **MAMBA,
        "hidden_size": 128,
        "num_heads": 2,
        "qk_dim_factor": 0.5,
        "v_dim_factor": 1.0,
        "chunkwise_kernel": "chunkwise--native_autograd",
        "sequence_kernel": "native_sequence__native",
        "step_kernel": "native",
        "tie_word_embeddings": False,
    },
    "bloom": {
        "vocab_size": 99,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "initializer_range": 0.02,
        "bos_token_id": 98,
        "eos_token_id": 98,
        "pad_token_id": 98,
        "slow_but_exact": True,
    },
    "roberta": {**BERT, "is_decoder": True},
    "git": {
        **{name: value for name, value in BERT.items() if name != "type_vocab_size"},
        "num_hidden_layers": 5,
        "vision_config": {"num_channels": 3, "image_size": 32, "patch_size": 16},
    },
}
"""By type, what a tester of its own gives to the config."""


COMMITS = {
    "jamba": "00d3cdbe",
    "mamba": "0096ba4f",
    "mamba2": "01080c62",
    "falcon_mamba": "011cba2c",
    "falcon_h1": "03a5fc59",
    "minimax": "03eac6f6",
    "deepseek_v4": "014707d7",
    "nemotron_h": "020a37d2",
    "zamba2": "020a37d2",
    "bloom": "01080c62",
    "xlstm": "06057816",
    "git": "0100fd70",
    "zaya": "00ddbf79",
    "roberta": "01edca39",
    "gpt2": "031e0ac8",
}
"""The commit of the file that was read, where the copy named one."""
SKIPPED = {
    "minimax": "prompt lookup, assisted decoding",
    "zaya": "packed rows",
    "deepseek_v4": "left padding",
    "mamba": "sampled beams",
    "bamba": "packed rows under flash attention",
    "xlstm": "greedy search and beams with `use_cache`, embeddings",
}
"""Of the types that fail, what of a cache their file skips with `unittest.skip`."""
EAGER = ("mixtral", "minimax", "deepseek_v4", "jamba")
"""Whose experts have rows of a width that the grouped product of torch 2.13 refuses on a CPU: they are run with the other one."""


def config_of(name: str) -> Any:
    """The config that their tester makes of a type."""
    config = _tested(name)
    if name in EAGER:
        config._experts_implementation = "eager"
    return config


def _tested(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    if name in WRITTEN:
        return kind(**WRITTEN[name])
    held = {**COMMON, **OF_COMMON[name]}
    common = {theirs: ours for ours, theirs in getattr(kind, "attribute_map", {}).items()}
    taken = [*inspect.signature(kind.__init__).parameters, "pad_token_id"]
    renamed = {theirs: common.get(theirs, theirs) for theirs in taken}
    return kind(**{theirs: held[ours] for theirs, ours in renamed.items() if ours in held})


def mixin_test(name: str, baseline: Path | None = None) -> unittest.TestCase:
    """The mixin's test on the generating class of a type, as a model's author would write it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from kvinterp.testing import CacheTesterMixin

    class Tester:
        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
            return config_of(name), {}

    class ModelTest(CacheTesterMixin, unittest.TestCase):
        all_generative_model_classes = (MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of(name))],)
        model_tester = Tester()
        cache_baseline = baseline

    return ModelTest("test_cached_decoding_is_recomputation")


def tried(name: str) -> dict[str, Any]:
    """What the mixin says of a type, and in how many processor seconds; of a failing one the uses that are wrong."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    began = time.process_time()
    outcome = unittest.TestResult()
    mixin_test(name).run(outcome)
    row: dict[str, Any] = {"type": name, "seconds": round(time.process_time() - began, 1), "wrong": {}}
    if outcome.errors:
        return {**row, "word": "error", "why": outcome.errors[0][1].strip().splitlines()[-1]}
    if not outcome.failures:
        return {**row, "word": "passes"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, KVINTERP_BASELINE="write"):
        mixin_test(name, place := Path(folder) / "faults.json").run(unittest.TestResult())
        wrong = json.loads(place.read_text()) if place.exists() else {}
    return {**row, "word": "fails", "wrong": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/ci.md: what fails first, then what passes."""
    lines = ["|type|processor seconds|the mixin|uses that are wrong|what their file skips|", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["word"] == "passes", row["type"])):
        wrong = "; ".join(use for uses in row["wrong"].values() for use in uses)
        lines.append(
            f"|`{row['type']}`|{row['seconds']}|{row['word']}|{wrong}|{SKIPPED.get(row['type'], '') if wrong else ''}|"
        )
    return "\n".join(lines)


def main() -> None:
    """Asks what is not asked yet, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*OF_COMMON, *WRITTEN])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []
    if given.table:
        print(table(rows))
        return
    import kvinterp.auditing.audit
    import kvinterp.testing  # noqa: F401  # what the children share

    known = {row["type"] for row in rows}
    with (
        multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool,
        RESULTS.open("a", encoding="utf-8") as file,
    ):
        for name in given.names:
            if name not in known:
                print(row := json.dumps(pool.apply(tried, (name,))), flush=True)
                print(row, file=file, flush=True)


if __name__ == "__main__":
    main()
