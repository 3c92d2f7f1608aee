"""Confines a process that runs code of a model: files, network, processes and memory. Needs no privilege."""
