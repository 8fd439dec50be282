"""Scenes, methods, metrics and the runner that measure ARR-COC."""
