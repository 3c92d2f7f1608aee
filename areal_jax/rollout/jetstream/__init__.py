"""Our engine behind JetStream's orchestrator and gRPC server, and its client (rollout.server='jetstream').

server/ runs in a process of its own, whose interpreter has JetStream; nothing else imports it. The other modules are
what both sides say to each other, and the client.
"""
