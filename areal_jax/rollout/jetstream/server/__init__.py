"""JetStream's Driver, LLMOrchestrator and gRPC server over our engine: what arrives there is served by http/service.py.

A call goes through JetStream's threads as one object, `open_call.OpenCall`, in place of its prompt and of its prefix.
`prefill` submits it to the service, `insert` gives it a slot, and a `generate` is the next delivered dispatch: up to
`decode_steps` tokens a slot, in as many columns of ResultTokens. Blocks, prefix cache, packed prefill and weights are
our scheduler's.
"""
