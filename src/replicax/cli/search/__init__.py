"""``replicax plan --search``: plans the same step with many placements, each in a separate process.

:mod:`~replicax.cli.search.choices` defines the cases, :mod:`~replicax.cli.search.case_processes` runs them, and
:mod:`~replicax.cli.search.ranking` sorts them and explains why some fail.
"""
