"""Tests never depend on timing: hypothesis' deadline is off, and its examples are the same in every run."""

from hypothesis import settings

settings.register_profile("elsi", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("elsi")
