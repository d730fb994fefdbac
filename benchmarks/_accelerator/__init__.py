"""The parts of ``benchmarks/accelerator.py``: each is a function that runs in a process of its own and yields results.

A result is a dictionary that names its table, ``{"table": "training", …}``. What a part has yielded stays if the part
fails later, or runs out of time.
"""
