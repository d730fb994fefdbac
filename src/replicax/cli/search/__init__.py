"""``replicax plan --search``: the same step with many placements, each planned in a process of its own.

:mod:`~replicax.cli.search.choices` has what is varied, :mod:`~replicax.cli.search.case_processes` runs the cases, and
:mod:`~replicax.cli.search.ranking` says which is best, and why the others are not.
"""
