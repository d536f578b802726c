"""Every causal architecture of transformers' auto classes, audited as small random weights."""
