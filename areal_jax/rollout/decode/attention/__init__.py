"""Attention of decode over a cache of blocks: the interface, and an implementation for each kind of hardware."""
