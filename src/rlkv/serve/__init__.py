"""Serving: capacity planning, the vLLM plugin, and OpenAI-compatible servers."""
