"""The laws this package holds its own activations to, for those of others: ``assert_laws(MY_GATE)`` is a test."""

from tensorformer.testing.laws import assert_laws

__all__ = ["assert_laws"]
