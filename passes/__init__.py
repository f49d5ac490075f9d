"""One kind of mixing per file."""
