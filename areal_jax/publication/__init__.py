"""Arrow 8, the weights of version v + 1 on their way to every engine, each version known by its manifest.

learner's copy -> Channel.transfer (device.py in this process, files.py as safetensors directories) -> PublishedWeights
-> Channel.receive -> an engine swaps between two dispatches. manifest.py says whether both ends hold the same weights;
export.py leaves the last version as a directory that Hugging Face tools load.
"""
