"""Runs in roles whose processes are killed and stopped: python -m checks.chaos_roles. See __main__.py."""
