"""Graph in, rewritten graph out."""
