"""Adapters for other libraries' datasets. Each file imports its library, and is imported only with such a dataset."""
