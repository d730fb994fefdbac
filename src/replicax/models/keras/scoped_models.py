"""Makes models that are created or compiled in a strategy's scope belong to the strategy."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.callbacks import BackupAndRestore, TensorBoard
from keras.src.callbacks.callback import Callback
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.trainers.trainer import Trainer
from keras.src.utils import python_utils

from replicax import context
from replicax.errors import ContextError
from replicax.models.keras import callbacks, multi_worker
from replicax.models.keras.batches import Feed
from replicax.models.keras.model_state import GROUPS, ModelState
from replicax.models.keras.step_functions import StepFunction
from replicax.strategy import Strategy

_NAME = "_replicax_functions"


class StepFunctions:
    """Makes the functions of one model, in place of the model's own methods."""

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.strategy = strategy
        self._model = model
        self._state = ModelState(strategy)
        self._feed = Feed(strategy.extended.replicas)

    def forget_state(self) -> None:
        """Free the devices' copies of the model's variables: it may have another optimizer from now on."""
        self._state = ModelState(self.strategy)

    def make_train_function(self, force: bool = False) -> None:
        """See ``keras.Model.make_train_function``."""
        self._make("train_function", "train_step", GROUPS, force)

    def make_test_function(self, force: bool = False) -> None:
        """See ``keras.Model.make_test_function``."""
        self._make("test_function", "test_step", (GROUPS[0], GROUPS[1], GROUPS[3]), force)

    def make_predict_function(self, force: bool = False) -> Any:
        """See ``keras.Model.make_predict_function``."""
        self._make("predict_function", "predict_step", GROUPS[:2], force)
        return self._model.predict_function

    def _make(self, name: str, method: str, groups: tuple[str, ...], force: bool) -> None:
        if getattr(self._model, name) is None or force:
            _check_no_other_distribution()
            _check_is_not_on_servers(self._model, self.strategy, method)
            _check_is_kerass_own(self._model, f"make_{name}", method)
            function = StepFunction(self._model, self.strategy, self._state, self._feed, method, groups)
            setattr(self._model, name, function)


def install() -> None:
    """Make models belong to the strategy in whose scope they are created or compiled, from now on."""
    if hasattr(Trainer.compile, _NAME):
        return
    for owner, name, wrap in (
        (Trainer, "__init__", _made_in_scope),
        (Trainer, "compile", _compiled_in_scope),
        (BatchNormalization, "__init__", _may_be_synchronized),
        (Callback, "set_model", _may_be_silent),
        (TensorBoard, "set_model", _may_be_silent),  # its own method already writes files
        (BackupAndRestore, "on_train_begin", _may_restore_together),
        (python_utils, "pythonify_logs", _letting_interrupts_through),
        (keras.Variable, "_direct_assign", _outside_steps),
    ):
        wrapper = wrap(getattr(owner, name))
        setattr(wrapper, _NAME, True)
        setattr(owner, name, wrapper)


def _made_in_scope(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        strategy = _strategy_here()
        if strategy is not None and keras.backend.backend() == "jax":
            _give(self, strategy)

    return wrapper


def _compiled_in_scope(compile: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compile)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy, present = _strategy_here(), vars(self).get(_NAME)
        if strategy is not None:
            _check_backend()
            if present is None:
                _give(self, strategy)
            elif present.strategy is not strategy:
                raise ValueError(
                    f"model.compile: the model {self.name!r} was made in the scope of {present.strategy!r}, and is "
                    f"compiled in that of {strategy!r}. Make a model for each strategy (keras.models.clone_model)."
                )
        compile(self, *args, **kwargs)
        if present is not None:
            present.forget_state()

    return wrapper


def _may_be_synchronized(init: Callable[..., None]) -> Callable[..., None]:
    """``BatchNormalization.__init__`` that accepts ``synchronized=True`` in a strategy's scope on JAX, too."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        ours = kwargs.get("synchronized") and keras.backend.backend() == "jax" and _strategy_here() is not None
        init(self, *args, **(kwargs | {"synchronized": False} if ours else kwargs))
        if ours:
            self.synchronized = True

    vars(wrapper)["__signature__"] = inspect.signature(init)  # Keras uses it to serialize layers
    return wrapper


def _may_be_silent(set_model: Callable[..., None]) -> Callable[..., None]:
    """``Callback.set_model`` that lets only one of several workers write the callback's files."""

    @functools.wraps(set_model)
    def wrapper(self: Any, model: Any) -> None:
        functions = getattr(model, _NAME, None)
        if functions is not None and multi_worker.is_silent(functions.strategy.extended.replicas):
            callbacks.silence(self)
        set_model(self, model)

    return wrapper


def _may_restore_together(begin: Callable[..., None]) -> Callable[..., None]:
    """``BackupAndRestore.on_train_begin`` that lets only one of several workers read the backup."""

    @functools.wraps(begin)
    def wrapper(self: Any, logs: Any = None) -> None:
        functions = getattr(self.model, _NAME, None)
        if functions is not None and functions.strategy.extended.replicas.lockstep.several:
            callbacks.restore_together(self, functools.partial(begin, self, logs), functions.strategy)
        else:
            begin(self, logs)

    return wrapper


def _letting_interrupts_through(pythonify: Callable[..., Any]) -> Callable[..., Any]:
    """``pythonify_logs`` that lets Ctrl-C through: Keras waits for the devices there, and ignores all exceptions.

    Callbacks that are not asynchronous call it on the main thread after each batch, so a program is nearly always there
    when a user interrupts it.
    """

    @functools.wraps(pythonify)
    def wrapper(logs: Any) -> Any:
        if logs:
            with contextlib.suppress(Exception):  # the next step raises it
                jax.block_until_ready(logs)
        return pythonify(logs)

    return wrapper


def _outside_steps(assign: Callable[..., None]) -> Callable[..., None]:
    """``Variable._direct_assign`` that is an error in a step: it would keep a traced value, and happen only once.

    Keras' own loops assign in a stateless scope, which returns the new values.
    """

    @functools.wraps(assign)
    def wrapper(self: Any, value: Any) -> None:
        if context.has_strategy() and not context.in_cross_replica_context():
            raise ContextError(
                f"the Keras variable {self.path!r} was made or assigned inside a step, which can change only variables "
                "of Replicax: build the model before, and train it by compile and fit, or use its stateless_call with "
                "replicax.Optimizer, replicax.Mean and replicax.Accuracy ('A loop of your own' in docs/keras.md)"
            )
        assign(self, value)

    return wrapper


def _strategy_here() -> Strategy | None:
    """The strategy of the caller's scope."""
    if not context.has_strategy() or not context.in_cross_replica_context():
        return None
    return context.get_strategy()


def _give(model: Any, strategy: Strategy) -> None:
    functions = StepFunctions(model, strategy)
    object.__setattr__(model, _NAME, functions)  # Keras tracks assignments to a model
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        object.__setattr__(model, name, getattr(functions, name))
    multi_worker.adapt(model, strategy.extended.replicas)


def _check_backend() -> None:
    backend = keras.backend.backend()
    if backend != "jax":
        raise RuntimeError(
            f"model.compile in strategy.scope(): expected Keras on JAX, but it runs on {backend}. Set the environment "
            "variable KERAS_BACKEND=jax before keras is imported."
        )


def _check_no_other_distribution() -> None:
    other = keras.distribution.distribution()
    if other is not None:
        raise RuntimeError(
            f"the model belongs to a strategy of Replicax, and keras.distribution is set to {other!r}: use one of them "
            "(keras.distribution.set_distribution(None))"
        )


def _check_is_not_on_servers(model: Any, strategy: Strategy, method: str) -> None:
    if strategy.extended.remote_variables is not None:
        loop = {"train_step": "fit", "test_step": "evaluate", "predict_step": "predict"}[method]
        raise ContextError(
            f"Keras' {loop} of the model {model.name!r} in a function that is scheduled on parameter servers: Keras "
            "has variables of its own, which no server has, so the workers would each have a model of their own. Run "
            "Keras' loop under MirroredStrategy, ShardedStrategy or MultiWorkerMirroredStrategy. For parameter servers "
            "keep the parameters in variables that strategy.scope() makes in the program that schedules, and schedule "
            "a function with strategy.run(step)."
        )


def _check_is_kerass_own(model: Any, maker: str, method: str) -> None:
    if getattr(type(model), maker) is not getattr(keras.Model, maker):
        raise TypeError(
            f"{type(model).__name__}.{maker} is the model's own, but a strategy's models get one that runs {method} on "
            f"each replica: override {method} instead"
        )
