"""The HTTP side of a server: aiohttp on a separate loop and thread.

thread.py starts it, bridge.py connects it with the service on the host's loop, routes are by dialect. asyncio may be
used here as in any program: it does not affect the engine's decisions.
"""
