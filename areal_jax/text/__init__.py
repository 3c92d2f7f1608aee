"""Text and tokens: tokenizers and chat templates."""
