"""A pool of two real servers under faults and abuse for a long time: python -m checks.soak. See __main__.py."""
