"""Kernels in C++ for CPUs, where XLA's own programs leave half of the machine unused."""
