"""Models: files, families, weights, tokenizers and chat templates."""
