"""Rollouts over HTTP: the wire formats, our server, and the clients of servers."""
