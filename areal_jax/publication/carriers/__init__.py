"""Carriers move records of weights from the learner to readers; each has a sender and a receiver (../record.py).

files_carrier.py     directories of whole versions, and files of deltas next to them
shm_carrier.py       shared memory of a host; shm_segment.py has its bytes
stream_sender.py     sockets, with stream_receiver.py at the other end; stream_socket.py has their messages

stream_receiver.py opens the receiver that an address names; stream_sender.py says which records a reader needs.

docs/design/carriers.md has bytes, states and failures.
"""
