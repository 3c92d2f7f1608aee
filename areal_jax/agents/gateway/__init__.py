"""The HTTP server that programs of episodes talk to, on the I/O loop of the run's clock.

gateway.py has the server, the keys and the replies, session.py reads requests and keeps what one program has asked.
What is sampled for a call is decided on the host's loop (agents/agent_workflow.py).
"""
