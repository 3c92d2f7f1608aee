"""The model of a run: its decoder, weights and tokenizer."""
