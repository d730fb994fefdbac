"""Keras 3 models on JAX: ``fit``, ``evaluate`` and ``predict`` run a strategy's replicas; see ``docs/keras.md``.

Keras' own loop, callbacks and input stay unchanged. A model that is created or compiled in a strategy's scope gets
other train, test and predict functions, through Keras' own interface (``make_train_function``); each runs the model's
``train_step`` on every replica, in one program.
"""
