"""Runs a rewritten artifact by continuous batching."""
