"""Publication: the weights of version v + 1 go to every engine; a manifest identifies each version.

learner's copy -> Channel.transfer (device_channel.py in this process, files_channel.py as safetensors directories,
record_channel.py as records) -> PublishedWeights -> Channel.receive -> an engine swaps between two dispatches.

A record (record.py) is a whole version, or what changed since the last one (delta.py). version_encoder.py makes it on
the learner's side, a carrier moves it, and weights_reader.py applies it to one of its weight_buffers.py beside the
weights in use. The carriers:

  files_carrier.py     directories, and the files of delta_file.py
  shm_carrier.py       shared memory of a host; shm_segment.py, shm_record.py and shm_readers.py have its bytes
  stream_sender.py     sockets, with stream_receiver.py at the other end; stream_frames.py has what they say
  receivers.py         the receiver that an address names
  chains.py            which records a reader needs, and which may go

manifest.py checks that both ends have the same weights; version_directory.py writes directories atomically; export.py
writes the final weights for tools of Hugging Face.
"""
