"""File formats defined elsewhere: GGUF (read only), safetensors and Hugging Face directories (read and written)."""
