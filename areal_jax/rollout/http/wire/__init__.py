"""The bodies of three HTTP dialects, in pure functions: SGLang, vLLM and OpenAI.

Each dialect parses a request body into an exchange.Call and renders exchange.Answers as its reply, whole or as
server-sent events; sglang and vllm also do the reverse, for clients. No serving stack, no jax.
"""
