"""Engines that are servers in other processes: their list, their states, and the server of each request."""
