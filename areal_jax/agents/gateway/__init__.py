"""The HTTP server that programs of episodes talk to, on the I/O loop of the run's clock.

gateway.py has the server and the keys, session.py what one program has asked, call_reader.py reads requests,
reply_writer.py writes replies. What is sampled for a call is decided on the host's loop (agents/program_agent.py).
"""
