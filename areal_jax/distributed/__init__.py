"""Training over several processes: one gives the commands of the learner, those that hold a learner execute them.

rendezvous.py        the processes of a learner find each other and wait until all are built
handshake.py         the key of the run, who listens, who connects, and whether both are of one run
peers.py             authenticated frames to one process or to all at the same time; notices when one is gone
messages.py          commands, batches, answers and failures as bytes
remote_learner.py    sends each command: process 0 of a learner, which executes it too, or a controller without jax
follower.py          a process with a learner: executes what it is sent
averages.py          the mean of a block over independent clients, through a directory
averaged_learner.py  a learner whose blocks are replaced by their means

docs/design/distributed.md says what is authenticated.
"""
