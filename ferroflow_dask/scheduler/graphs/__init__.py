"""Graphs that arrive on the scheduler: bundled before their tasks are created, split again after errors."""
