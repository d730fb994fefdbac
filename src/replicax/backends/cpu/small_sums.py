"""Sums of many small arrays over the replicas, which are packed.

An all-reduce takes time for each array on XLA's CPU backend (16.7 ms for 100 arrays of 4 KiB on 8 devices, and 2.7 ms
when they are packed into one). Copying large arrays costs more than that saves. Measured by ``benchmarks/packing.py``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from replicax import _jax
from replicax.backends.cpu.apart import cut_alike
from replicax.backends.cpu.rule import CPURule
from replicax.collectives import PACK_LIMIT, all_reduce_p, packs
from replicax.communication import CommunicationImplementation, CommunicationOptions
from replicax.execution.compiled.program_rewriting import Rewriting


class SmallSums(CPURule):
    """Sums over the replicas of many small arrays, which are packed."""

    def is_ours(self, equation: _jax.Equation) -> bool:
        if equation.primitive is not all_reduce_p or equation.params["in_order"]:
            return False
        options = equation.params["options"] or CommunicationOptions()
        is_plain = not options.bytes_per_pack and options.implementation is not CommunicationImplementation.RING
        avals = [v.aval for v in equation.invars]
        # XLA aborts at sums of complex constants with several elements, which scalars that are packed would become.
        return is_plain and not any(map(jnp.iscomplexobj, avals)) and bool(packs(avals, PACK_LIMIT)[0])

    def replaced(self, equation: _jax.Equation, operands: list[Any], rewriting: Rewriting) -> list[Any]:
        avals: list[Any] = [v.aval for v in equation.invars]  # operands may be plain numbers
        groups, whole = packs(avals, PACK_LIMIT)
        buffers = [jnp.concatenate([lax.reshape(operands[i], (avals[i].size,)) for i in members]) for members in groups]
        totals = all_reduce_p.bind(*buffers, *(operands[i] for i in whole), **equation.params)
        results = dict(zip(whole, totals[len(groups) :], strict=True))
        for members, total in zip(groups, totals, strict=False):
            results.update(zip(members, cut_alike(total, [avals[i].shape for i in members]), strict=True))
        return [results[i] for i in range(len(operands))]
