"""JetStream's Driver, LLMOrchestrator and gRPC server over our engine: http/service.py serves their requests.

A call passes JetStream's threads as one object, `relay.OpenCall`, which replaces its prompt and its prefix. `prefill`
submits it to the service, `insert` gives it a slot, and a `generate` is the next delivered dispatch: up to
`decode_steps` tokens per slot, in as many columns of ResultTokens. Our scheduler manages blocks, prefix cache, packed
prefill and weights.
"""
