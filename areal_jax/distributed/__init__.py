"""Training over several processes: one process sends the learner's commands, and all with a learner execute them.

rendezvous.py        the processes of a learner find each other and wait until all are built
handshake.py         learner processes find each other, the key of the run, listening and connecting, and the check that
                     both ends are of one run
peers.py             authenticated messages, in parts of bounded size, to one process or to all at the same time;
                     notices a lost process
messages.py          commands, batches, answers and failures as bytes
remote_learner.py    one end sends each command: process 0 of a learner, which executes it too, or a controller without
                     jax; the other end, a process with a learner, executes it; process 0 sends the others their rows
averaged_learner.py  a learner whose blocks are replaced by their means over independent clients, through a directory

docs/design/distributed.md says what is authenticated.
"""
