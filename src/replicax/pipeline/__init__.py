"""Pipelines: programs whose operations are placed on logical devices, and so become many programs.

One program for all devices, which branches on the logical device and exchanges values by permutes, was several times
slower: it joins all stages at each exchange, does unnecessary work, and pads each stage's parameters to the largest. It
could cross hosts. Separate programs can't: the devices of a replica belong to one process.
"""
