"""Fixtures that several modules of this folder use."""

from support.signals import undisturbed

__all__ = ["undisturbed"]
