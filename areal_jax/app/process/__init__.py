"""Sets up and ends the process of a command: signals, exit codes, memory, threads."""
