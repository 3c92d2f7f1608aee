"""Training over several processes: process 0 drives the loop, the others execute its learner's commands.

rendezvous.py   the processes find each other and wait until all are built
invitation.py   process 0 opens one connection to each follower
messages.py     what is sent over a connection
peers.py        one end of a connection; notices when the other process is gone
leader.py       process 0: sends each command, then executes it
follower.py     every other process: executes what process 0 sends
"""
