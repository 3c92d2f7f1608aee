"""The HTTP server that programs of episodes talk to, on the I/O loop of the run's clock.

gateway.py has the server and the keys, session.py what one program has asked, session.py reads requests,
gateway.py writes replies. What is sampled for a call is decided on the host's loop (agents/agent_workflow.py).
"""
