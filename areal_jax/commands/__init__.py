"""How every command presents itself: its declaration, its help and version, the list of all, completion in a shell."""
