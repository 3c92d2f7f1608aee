"""Confines a process that runs code which a model wrote: files, network, processes, memory, without a privilege."""
