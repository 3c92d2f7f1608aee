"""Engines that are servers in other processes: which there are, which serve, where a request is."""
