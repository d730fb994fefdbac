"""Replicax beside its peers: the same trainings in JAX by hand, Flax NNX, Keras, TensorFlow and PyTorch, in turn."""
