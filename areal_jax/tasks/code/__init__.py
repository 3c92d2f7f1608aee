"""The task `code`: functions and programs that a model wrote, run in a sandbox and judged by tests."""
