"""Configs as the command line composes them."""

from support.command import composed

__all__ = ["composed"]
