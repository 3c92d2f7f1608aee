"""Starts the processes of a run: launch.local on this machine. Nothing here imports jax.

local.py builds the commands, supervisor.py starts, restarts and ends the programs, and each runs under a keeper
(keeper.py), which ends it when the launcher is gone.
"""
