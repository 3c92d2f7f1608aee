"""The live view of a run in a terminal (areal-watch): what it reads, and a frame of it."""
