"""Publication: the weights of version v + 1 go to every engine; a manifest identifies each version.

learner's copy -> Channel.transfer (device_channel.py in this process, files_channel.py as safetensors directories) ->
PublishedWeights -> Channel.receive -> an engine swaps between two dispatches. manifest.py checks that both ends have
the same weights; version_directory.py writes directories atomically; export.py writes the final weights for tools of
Hugging Face.
"""
