"""What a command sets for its process: signals, exit codes, memory, threads."""
