"""Small programs for TensorFlow, and what ``replicax migrate`` finds in them and writes into them."""

from __future__ import annotations

import ast
import pathlib
import textwrap

from replicax_migrate.rewriting import rewritten
from replicax_migrate.source_files import SourceProgram, parse
from replicax_migrate.uses import NameUse, find_uses

ROOT = pathlib.Path(__file__).parents[3]
PAGE = str(ROOT / "tools" / "docs" / "migrate_page.py")

TF = "import tensorflow as tf\n"
STRATEGY = f"{TF}s = tf.distribute.MirroredStrategy()\n"
GET = f"{TF}s = tf.distribute.get_strategy()\n"
TOWERS = """\
import tensorflow as tf
from tensorflow.contrib.distribute import MirroredStrategy, get_tower_context

d = MirroredStrategy(num_gpus=2)

def tower_fn(x):
    context = get_tower_context()
    total = context.merge_call(lambda d, x: d.reduce(tf.VariableAggregation.SUM, x, x), x)
    return total / context.num_towers

with d.scope():
    iterator = d.distribute_dataset(dataset_fn).make_one_shot_iterator()
    results = d.call_for_each_tower(tower_fn, iterator.get_next())
    print(d.unwrap(results), d.fetch(results))
"""


def uses_of(text: str) -> list[NameUse]:
    text = textwrap.dedent(text)
    return find_uses(ast.parse(text), text.split("\n"))


def found_in(text: str) -> dict[str, str]:
    """What takes the place of each name, by the name as it is written."""
    return {use.name: use.counterpart.modern or use.counterpart.today for use in uses_of(text)}


def written_into(text: str) -> str:
    tree = parse(text)
    program = SourceProgram(pathlib.Path("p.py"), text, tree)
    return rewritten(program, find_uses(tree, program.lines))
