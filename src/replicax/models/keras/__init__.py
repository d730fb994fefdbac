"""Keras 3 models on JAX: ``fit``, ``evaluate`` and ``predict`` run a strategy's replicas; see ``docs/keras.md``.

Keras' own loop, callbacks and input stay as they are. A model that is made or compiled in a strategy's scope gets other
train, test and predict functions, by Keras' own means (``make_train_function``); each runs the model's ``train_step``
on every replica, in one program.
"""
