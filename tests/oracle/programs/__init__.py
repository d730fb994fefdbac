"""All programs, by topic. A program knows neither TensorFlow nor JAX, only a ``Library``."""

from tests.oracle.programs import (
    clusters,
    collectives,
    contexts,
    coordinators,
    extended,
    gathering,
    inputs,
    merging,
    nests,
    reducing,
    running,
    towers,
    training,
    variable_details,
    variables,
)

TOPICS = [
    variables.topic,
    variable_details.topic,
    reducing.topic,
    gathering.topic,
    collectives.topic,
    merging.topic,
    contexts.topic,
    running.topic,
    nests.topic,
    extended.topic,
    training.topic,
    inputs.topic,
    towers.topic,
    clusters.topic,
    coordinators.topic,
]

PROGRAMS = [program for topic in TOPICS for program in topic.programs]
"""Every program; their names are all different."""
