"""Files of others: GGUF, safetensors and Hugging Face directories, reader and writer of one format side by side."""
