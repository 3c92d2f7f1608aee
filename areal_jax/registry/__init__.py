"""Where the processes of a run find each other: the directory WORKDIR/registry, on a file system that all of them see.

entries.py    what a process says of itself, and who holds a name
entries.py  the thread that says that a process is alive, and that learns when another one took its name
entries.py   which entries are of living processes, and waits for those that shall come
entries.py  whether the directory can do what this needs
"""
