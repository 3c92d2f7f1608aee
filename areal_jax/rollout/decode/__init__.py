"""Inside arrow 3: what an engine runs on its devices: prefill, insert, decode and sample."""
