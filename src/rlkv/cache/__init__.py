"""KV cache layers in torch; they know nothing of transformers."""
