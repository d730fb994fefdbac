"""Reasons for differences that several topics share."""

BRANCH = (
    "A compiled step has one Python run for all replicas, in which no value is known, so Python can't branch on one: "
    "jax.lax.cond and jnp.where do, in one program for all."
)
BRANCH_PER_REPLICA = (
    "The per-replica executor runs the step as plain Python, once for each replica, and may branch on what it has."
)

NEGATIVE_AXIS = "A negative axis counts from the end, as it does in reduce. TensorFlow fails inside its own graph."
