"""Expert routing: each row through the weight matrix of its own expert."""

from .schema import expert_linear

__all__ = ["expert_linear"]
