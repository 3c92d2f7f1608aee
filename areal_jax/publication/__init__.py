"""Publication: the weights of version v + 1 go to every engine; a manifest identifies each version.

learner's copy -> Channel.transfer (files_channel.py in this process or as safetensors directories, record_channel.py
as records) -> PublishedWeights -> Channel.receive -> an engine swaps between two dispatches.

A record (record.py) is a whole version, or the changes since the last one (delta.py). record_channel.py makes it on
the learner's side, and a carrier (carriers/) moves it. At the other end record_channel.py applies it, in a buffer next
to the weights in use, or weight_buffers.py makes a directory of it for servers that load no records.

manifest.py checks that both ends have the same weights; export.py writes directories atomically, including the final
weights for Hugging Face tools.
"""
