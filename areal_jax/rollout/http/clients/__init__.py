"""Adapters that make servers with SGLang's or vLLM's protocol engines of this project.

`engine.ServerEngine` drives one `server.Server`, which speaks a `connection.Dialect` (`sglang`, `vllm`) over a
`connection.Connection`.
"""
