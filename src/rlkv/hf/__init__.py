"""Hugging Face models: the only package that imports transformers."""
