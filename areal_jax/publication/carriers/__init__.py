"""Carriers of records of weights from the learner to readers in other memory.

  shm_carrier.py       shared memory of a host; shm_segment.py, shm_record.py and shm_readers.py have its bytes
  stream_sender.py     sockets, with stream_receiver.py at the other end; stream_frames.py has what they say
  receivers.py         the receiver that an address names
  chains.py            which records a reader needs, and which may go

docs/design/carriers.md has bytes, states and failures.
"""
