"""Engines of others as engines of this project: servers that speak SGLang's or vLLM's protocol.

`engine.ServerEngine` drives one `server.Server`, which speaks a `dialect.Dialect` (`sglang`, `vllm`) over a
`connection.Connection`.
"""
