"""Regraft: serve any Hugging Face causal LM from its own unmodified code."""
