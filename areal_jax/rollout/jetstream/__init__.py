"""Our engine behind JetStream's orchestrator and gRPC server, and its client (rollout.server='jetstream').

server/ runs in a separate process, whose interpreter has JetStream; no other module imports it. The other modules are
the messages between both sides, and the client.
"""
