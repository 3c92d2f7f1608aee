"""File formats defined elsewhere: GGUF, safetensors and Hugging Face directories, each reader beside its writer."""
