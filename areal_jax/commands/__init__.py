"""The interface of every command: declaration, help and version, the list of all commands, completion in a shell."""
