"""The HTTP side of a server: aiohttp on a loop and a thread of its own.

thread.py starts it, bridge.py goes from it to the service on the host's loop and back, routes are by dialect.
asyncio may be used here as any program uses it: nothing of it decides what the engine does.
"""
