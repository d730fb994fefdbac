"""Chaos: a real run under the launcher, with faults at aimed moments, which must end as if nothing had happened."""
