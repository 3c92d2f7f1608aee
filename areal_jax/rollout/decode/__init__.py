"""The programs that an engine in this process runs on its device for generation: prefill, insert, decode and sample."""
