"""Fields of configs that a small model of some architectures needs beside the bank's own sizes."""

from __future__ import annotations

from typing import Any

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}

WILD: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bert-generation": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16},
    "gemma3": {"text_config": TEXT, "vision_config": VISION},
    "emu3": {"text_config": TEXT},
    "fuyu": {"text_config": {**TEXT, "model_type": "persimmon", "num_key_value_heads": 4}},
    "llama4": {"text_config": {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 48}, "vision_config": VISION},
    "mllama": {"text_config": {**TEXT, "cross_attention_layers": [1]}, "vision_config": VISION},
    "got_ocr2": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": VISION},
    "git": {"vision_config": {**VISION, "model_type": "git_vision_model"}},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "num_hidden_layers": 2,
        "feed_forward_size": 48,
        "hash_seed": 0,
    },
    "whisper": {"decoder_ffn_dim": 48, "max_target_positions": 256},
    "xlm": {"causal": True, "emb_dim": 32},
    "xlnet": {"attn_type": "uni", "d_head": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
}
"""By model type; what stands in the bank needs nothing here."""
