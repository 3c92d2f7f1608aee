"""Long programs that kill, stop, starve and abuse real runs and servers, and break the code: see README.md."""
