"""Engines of others as engines of this project: servers that speak SGLang's or vLLM's protocol.

`engine.ServerEngine` drives one server through a `dialect.Dialect`, which `sglang` and `vllm` implement over a
`connection.Connection`.
"""
