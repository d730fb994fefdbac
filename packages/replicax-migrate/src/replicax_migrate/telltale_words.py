"""Telltale words: names that tell that a program uses distribution, and of which generation."""

from __future__ import annotations

import ast
import re

from replicax_migrate.counterparts import V1, Counterpart
from replicax_migrate.old_names import NAMES
from replicax_migrate.original_names import MEMBERS, TOWER, TOWER_MEMBERS
from replicax_migrate.run_names import RUNS

STRATEGY_KINDS = ("Strategy", "StrategyExtended", "ReplicaContext")

UNMISTAKABLE = {
    name: kind
    for table in (MEMBERS, TOWER_MEMBERS)
    for kind in ("InputContext", "DistributedDataset", "StrategyExtended", "ReplicaContext", "Strategy")
    for name in table.get(kind, "").split()
    if re.search(r"replica|tower|merge_call|logical_device|experimental_(run|dist|local|make)|datasets_from_fu", name)
    or name in ("batch_reduce_to", "broadcast_to", "reduce_to", "run_steps_on_dataset", "update_non_slot")
} | {"num_replicas_in_sync": "Strategy", "create_per_worker_dataset": "ClusterCoordinator"}
"""Members that nothing else has, by the kind of what has them."""

COMMON_WORDS = {"num_towers", "tower_id"}
"""Members of the tower API that other programs have, too, for something of their own."""

_TOWER_WORDS = {"run_steps_on_dataset", "worker_device_index"}
_TOWER_NAMES = {name for names in (*TOWER.values(), *TOWER_MEMBERS.values()) for name in names.split()}
_MODERN_WORDS = {
    name for kind in STRATEGY_KINDS for name in MEMBERS[kind].split() if name not in TOWER_MEMBERS.get(kind, "").split()
} - {"configure", "strategy", "devices", "gather", "run"}

ESTIMATOR = Counterpart(NAMES["replicax"]["DistributeConfig"])
_AGGREGATE = Counterpart("aggregate=False, of replicax.Optimizer.apply_gradients, for gradients that have been reduced")

KEYWORDS = {
    "train_distribute": ESTIMATOR,
    "eval_distribute": ESTIMATOR,
    "experimental_distribute": ESTIMATOR,
    "experimental_aggregate_gradients": _AGGREGATE,
    "skip_gradients_aggregation": _AGGREGATE,
}
"""Keyword arguments of functions outside distribution that are about it."""

ATTRIBUTES = {
    "train_distribute": ESTIMATOR,
    "eval_distribute": ESTIMATOR,
    "experimental_distribute": Counterpart("replicax.InputOptions, an argument of strategy.distribute_dataset"),
    "_distributed_apply": Counterpart("optimizer.apply_gradients(gradients, variables), in a step"),
}
"""Attributes of things outside distribution that are about it."""

_SIGNS = {
    *(name for names in RUNS.values() for name in names.split() if name[0].isupper()),
    "keras",
    "distribution_strategy",
    "multi_gpu_model",
    "tensorflow",
    "replicax",
    "tf",
    "tf1",
    "tf2",
    *UNMISTAKABLE,
    *ATTRIBUTES,
    *KEYWORDS,
}


def may_use(tree: ast.Module) -> bool:
    """Whether a program is worth a closer look: most are not, and a folder may have thousands."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names = {alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom():
                names = {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                names = {name}
            case ast.Constant("TF_CONFIG"):
                return True
            case _:
                continue
        if names & _SIGNS:
            return True
    return False


def has_tower_words(tree: ast.Module) -> bool:
    """Whether a program has words that only the tower API of 1.9 to 1.12 has."""
    words, _ = _words_and_modules(tree)
    return any("tower" in word for word in (words & _TOWER_NAMES) - COMMON_WORDS) or bool(words & _TOWER_WORDS)


def is_tower_program(tree: ast.Module) -> bool:
    """Whether a program is written for the tower API of 1.9 to 1.12, and not for a later one."""
    words, modules = _words_and_modules(tree)
    if has_tower_words(tree) or V1 in modules:
        return True
    is_contrib = "contrib" in words or any("contrib" in module for module in modules)
    chains = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "distribute")
    is_modern = words & _MODERN_WORDS or any(isinstance(node.value, ast.Name) for node in chains)
    return is_contrib and not is_modern and "replicax" not in modules  # which --write brings to others


def _words_and_modules(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names and attributes in a program, and the modules that it imports."""
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    imported = {alias.name for node in imports for alias in node.names}
    modules = {module for node in imports if (module := getattr(node, "module", None))}
    return words | imported, modules | imported
