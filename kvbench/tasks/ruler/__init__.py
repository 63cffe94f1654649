"""RULER: thirteen generated tasks of any length (arXiv 2404.06654)."""

from kvbench.tasks.ruler.task import TASKS, Ruler, clean, match_all, match_part

__all__ = ["TASKS", "Ruler", "clean", "match_all", "match_part"]
