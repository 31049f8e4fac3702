"""Prefetch: tasks are sent to a worker before their inputs exist, and start when the inputs do."""
