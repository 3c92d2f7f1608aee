"""The HTTP server that programs of episodes talk to, on the I/O loop of the run's clock.

gateway.py has the server, the keys and the replies; session.py reads requests and keeps the calls of one program. The
host's loop decides what is sampled for a call (agents/agent_workflow.py).
"""
