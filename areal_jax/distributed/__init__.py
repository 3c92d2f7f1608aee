"""Training over several processes: one gives the commands of the learner, those that hold a learner execute them.

rendezvous.py      the processes of a learner find each other and wait until all are built
handshake.py             the key of the run, by which its processes know each other
handshake.py       who listens, who connects, and whether both are of one run
peers.py            authenticated frames over a socket, to one process or to all at the same time
messages.py           values as bytes; messages.py has the batch of an update
messages.py        commands and answers, and how a failure is told
peers.py           the processes at the other ends; notices when one is gone
remote_learner.py          process 0 of a run without a controller: sends each command, then executes it
remote_learner.py  a controller without a learner: its commands go to all learner processes. No jax
follower.py        a process with a learner: executes what it is sent
rendezvous.py      process 0 opens its connections
averages.py          the mean of a block over independent clients, through a directory
averaged_learner.py  a learner whose blocks are replaced by their means

docs/design/distributed.md says what is authenticated.
"""
