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

LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
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
    "qwen3_5": {
        "text_config": {**TEXT, "layer_types": ["linear_attention", "full_attention"], **LINEAR},
        "vision_config": TINY,
    },
    "qwen3_5_moe": {
        "text_config": {**TEXT, "layer_types": ["linear_attention", "full_attention"], **LINEAR, **EXPERTS},
        "vision_config": TINY,
    },
    "qwen4_exp": {"text_config": {**TEXT, **EXPERTS}, "vision_config": TINY},
    "gemma3n": {"text_config": TEXT},
    "gemma4": {
        "text_config": {**TEXT, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
        "vision_config": None,
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": {**TEXT, "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
        "vision_config": None,
        "audio_config": None,
    },
    "dots3_note": {
        "text_config": {**TEXT, **EXPERTS, "num_key_value_heads": 4},
        "vision_config": TINY,
        "audio_config": None,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            of: {"rope_type": "default", "rope_theta": 1e4} for of in ("sliding_attention", "full_attention")
        },
    },
    "moss_transcribe_diarize": {
        "text_config": TEXT,
        "audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 48, "encoder_attention_heads": 4},
    },
    "phi4_multimodal": {
        "vision_config": VISION,
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
        },
    },
    "whisper": {"decoder_ffn_dim": 48, "max_target_positions": 256},
    "xlm": {"causal": True, "emb_dim": 32},
    "xlnet": {"attn_type": "uni", "d_head": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
}
"""By model type; what stands in the bank needs nothing here."""

SOURCED: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "paligemma": {"vision_config": {"projection_dim": 32}},
    "t5gemma2": {"encoder": {"text_config": {**TEXT, "sliding_window": 16}, "vision_config": VISION}},
    # A cache of states alone does not say how much it holds, and the model asks it.
    **{
        name: {"text_config": {"layer_types": ["linear_attention", "full_attention"]}}
        for name in ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
    },
    "vipllava": {"vision_feature_layers": [-1]},
    # generate() makes as many layers of a cache as the encoder has.
    "switch_transformers": {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
"""By model type, of those whose rows read something besides their text; a config within a config may be given a model type."""
